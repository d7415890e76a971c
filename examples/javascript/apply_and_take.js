// Averages two gradients on a gradserve server, using nothing but the protos of this repository.
// Needs Node.js 18 or newer. From the top folder of a checkout, with a server running (`make serve`):
//
//   npm install --prefix examples/javascript
//   node examples/javascript/apply_and_take.js localhost:50051

'use strict';

const { randomUUID } = require('node:crypto');
const path = require('node:path');
const grpc = require('@grpc/grpc-js');
const protoLoader = require('@grpc/proto-loader');

const CALL_TIMEOUT_MS = 30_000;

const definition = protoLoader.loadSync('gradserve/v1/accumulator_service.proto', {
  includeDirs: [path.join(__dirname, '..', '..', 'proto')],
  keepCase: true,
  enums: String,
  // A JavaScript number is exact only up to 2^53, so 64-bit fields are read as
  // strings, which toInteger below converts to a number or a BigInt.
  longs: String,
  defaults: true,
});
const { AccumulatorService } = grpc.loadPackageDefinition(definition).gradserve.v1;

/** Converts a 64-bit field to a number if that is exact, otherwise to a BigInt. */
function toInteger(text) {
  const value = BigInt(text);
  const number = Number(value);
  return Number.isSafeInteger(number) ? number : value;
}

/** Creates an inline FLOAT32 tensor; the bytes are little-endian on every machine. */
function toTensor(values, shape = [values.length]) {
  const content = Buffer.alloc(4 * values.length);
  values.forEach((value, index) => content.writeFloatLE(value, 4 * index));
  return { dtype: 'DATA_TYPE_FLOAT32', shape, content };
}

/** Reads the elements of an inline FLOAT32 tensor. */
function fromTensor({ dtype, content }) {
  if (dtype !== 'DATA_TYPE_FLOAT32') {
    throw new Error(`expected a FLOAT32 tensor, got ${dtype}`);
  }
  return Array.from({ length: content.length / 4 }, (_, index) => content.readFloatLE(4 * index));
}

/** Calls a method of the service with a deadline; returns a promise. */
function call(client, method, request) {
  return new Promise((resolve, reject) => {
    const deadline = new Date(Date.now() + CALL_TIMEOUT_MS);
    client[method](request, { deadline }, (error, response) => (error ? reject(error) : resolve(response)));
  });
}

async function main(address) {
  const client = new AccumulatorService(address, grpc.credentials.createInsecure());
  const accumulator = { name: `javascript-${randomUUID()}` };
  try {
    await call(client, 'CreateAccumulator', {
      accumulator,
      spec: { components: [{ dtype: 'DATA_TYPE_FLOAT32', shape: { dims: [3] } }] },
    });
    await applyAndTake(client, accumulator);
    // The server keeps accumulators until they are deleted.
    await call(client, 'DeleteAccumulator', { accumulator });
  } finally {
    client.close();
  }
}

async function applyAndTake(client, accumulator) {
  // Every apply and take carries an id, so resending one has no second effect.
  const clientId = randomUUID();
  let sequence = 0;
  const nextId = () => ({ client_id: clientId, sequence: ++sequence });

  const gradients = [[1, 2, 3], [3, 6, 9]];
  for (const values of gradients) {
    const request = {
      accumulator,
      request_id: nextId(),
      local_step: 0,
      gradient: [{ dense: toTensor(values) }],
      worker_id: 'javascript',
    };
    const first = await call(client, 'ApplyGradient', request);
    const count = toInteger(first.num_accumulated);
    console.log(`applied [${values.join(', ')}]: ${first.outcome}, ${count} in the round`);
    const second = await call(client, 'ApplyGradient', request);
    console.log(`sent again: duplicate is ${second.duplicate}, nothing was counted twice`);
  }

  await showWrongShape(client, accumulator, nextId());

  const { average } = await call(client, 'TakeGradient', {
    accumulator,
    request_id: nextId(),
    num_required: gradients.length,
  });
  const values = fromTensor(average.components[0].dense);
  const [count, step] = [toInteger(average.num_gradients), toInteger(average.step)];
  console.log(`average of ${count} gradients: [${values.join(', ')}], now at step ${step}`);
}

async function showWrongShape(client, accumulator, requestId) {
  try {
    await call(client, 'ApplyGradient', {
      accumulator,
      request_id: requestId,
      local_step: 0,
      gradient: [{ dense: toTensor([1, 2, 3, 4], [2, 2]) }],
      worker_id: 'javascript',
    });
  } catch (error) {
    if (error.code !== grpc.status.INVALID_ARGUMENT) {
      throw error;
    }
    console.log(`wrong shape: ${error.code} ${grpc.status[error.code]}: ${error.details}`);
    return;
  }
  throw new Error('a gradient of the wrong shape was accepted');
}

if (process.argv.length !== 3) {
  console.error('usage: node apply_and_take.js HOST:PORT');
  process.exitCode = 2;
} else {
  main(process.argv[2]).catch((error) => {
    console.error(error.message);
    process.exitCode = 1;
  });
}
