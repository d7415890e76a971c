// Tensors on the wire: inside of messages if they are small, otherwise in streams of chunks.
//
// A tensor here is { shape, elements }, with a typed array of elements. Its bytes on the wire are little-endian, as
// typed arrays are on every processor that Node.js runs on.

'use strict';

const { once } = require('node:events');
const { CALL_SECONDS, withRetries } = require('./server');

const CHUNK_BYTES = 1 << 20;
const DTYPES = new Map([
  [Float32Array, 'DATA_TYPE_FLOAT32'],
  [Float64Array, 'DATA_TYPE_FLOAT64'],
  [Uint8Array, 'DATA_TYPE_UINT8'], // of packed tensors
]);
const TYPES = new Map([...DTYPES].map(([type, dtype]) => [dtype, type]));

const dtypeOf = (elements) => DTYPES.get(elements.constructor);
const bytesOf = ({ elements }) => Buffer.from(elements.buffer, elements.byteOffset, elements.byteLength);

function fromBytes(dtype, shape, bytes) {
  const Type = TYPES.get(dtype);
  if (!Type) {
    throw new Error(`expected float32 or float64 from the server, got ${dtype}`);
  }
  return { shape, elements: new Type(Uint8Array.from(bytes).buffer) }; // a copy, which is aligned
}

/** Converts tensors to those of a request; the handles of large ones are uploaded first. */
async function toWire(server, tensors, inlineLimit) {
  if (tensors.reduce((sum, { elements }) => sum + elements.byteLength, 0) > inlineLimit) {
    return putTensors(server, tensors);
  }
  return tensors.map((tensor) => ({ dtype: dtypeOf(tensor.elements), shape: tensor.shape, content: bytesOf(tensor) }));
}

/** Converts tensors of a response; stored ones are read, and released. */
async function fromWire(server, tensors) {
  const handles = tensors.filter(({ data }) => data === 'handle').map(({ handle }) => handle);
  const stored = handles.length ? await getTensors(server, handles, true) : [];
  return tensors.map((each) => (
    each.data === 'handle' ? stored.shift() : fromBytes(each.dtype, each.shape, each.content)
  ));
}

/** The messages of an upload: the header, then the bytes of all tensors, which are cut anywhere. */
function* uploadMessages(tensors) {
  const specs = tensors.map(({ shape, elements }) => ({ dtype: dtypeOf(elements), shape }));
  yield { header: { tensors: specs, for_next_call: true } };
  for (const tensor of tensors) {
    const bytes = bytesOf(tensor);
    for (let start = 0; start < bytes.length; start += CHUNK_BYTES) {
      yield { chunk: bytes.subarray(start, start + CHUNK_BYTES) };
    }
  }
}

/** Stores tensors on the server for the next call; returns one handle for each, as tensors of a request. */
function putTensors(server, tensors, seconds = CALL_SECONDS) {
  return withRetries(seconds, async (deadline) => {
    let call;
    const answer = new Promise((resolve, reject) => {
      call = server.tensors.PutTensors(server.metadata, { deadline }, (error, reply) => (
        error ? reject(error) : resolve(reply)
      ));
    });
    for (const message of uploadMessages(tensors)) {
      if (!call.write(message)) {
        // No more is buffered than the connection takes. A server that refuses the upload answers before its end.
        await Promise.race([once(call, 'drain'), answer]);
      }
    }
    call.end();
    return (await answer).tensors.map(({ handle }) => ({ handle }));
  });
}

/** Reads stored tensors, chunk by chunk; `release` deletes them once they are sent. */
function getTensors(server, handles, release = false, seconds = CALL_SECONDS) {
  return withRetries(seconds, async (deadline) => {
    let tensors;
    let payload;
    let filled = 0;
    // The loop asks for a message when it has the one before: what is not read yet waits on the server.
    for await (const message of server.tensors.GetTensors({ handles, release }, server.metadata, { deadline })) {
      if (message.part === 'header') {
        tensors = message.header.tensors.map(({ dtype, shape }) => ({ dtype, shape, length: numBytes(dtype, shape) }));
        payload = Buffer.allocUnsafe(tensors.reduce((sum, { length }) => sum + length, 0));
      } else {
        filled += message.chunk.copy(payload, filled);
      }
    }
    let start = 0;
    return tensors.map(({ dtype, shape, length }) => {
      start += length;
      return fromBytes(dtype, shape, payload.subarray(start - length, start));
    });
  });
}

function numBytes(dtype, shape) {
  return shape.reduce((product, size) => product * size, TYPES.get(dtype).BYTES_PER_ELEMENT);
}

module.exports = { dtypeOf, fromWire, getTensors, putTensors, toWire };
