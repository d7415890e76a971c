// A connection to the bulk socket of a gradserve server: calls in frames, with tensors of any size beside the messages.
// docs/sockets.md specifies the frames.

'use strict';

const net = require('node:net');
const { randomUUID } = require('node:crypto');

const HEADER_BYTES = 32;
const SEGMENT_BYTES = 32;
const ALIGNMENT = 64;
const PROTOCOL = 0x31535247n; // "GRS1"
const HELLO = 1;
const CALL = 2;
const REPLY = 3;

/** An error that the server answered with; `code` is gRPC's. */
class CallError extends Error {
  constructor(status) {
    super(status.message);
    this.code = status.code;
  }
}

function packHeader({ kind, name = 0, message = 0, payload = 0, number = 0n }) {
  const header = Buffer.alloc(HEADER_BYTES);
  header.writeUInt8(kind, 0);
  header.writeUInt16LE(name, 2);
  header.writeUInt32LE(message, 4);
  header.writeBigUInt64LE(BigInt(payload), 8);
  header.writeBigUInt64LE(number, 16);
  return header;
}

function unpackHeader(header) {
  return {
    kind: header.readUInt8(0),
    code: header.readUInt8(1),
    name: header.readUInt16LE(2),
    message: header.readUInt32LE(4),
    payload: Number(header.readBigUInt64LE(8)),
    size: Number(header.readBigUInt64LE(24)),
  };
}

/** The payload of a call: the elements of its tensors, at offsets that are multiples of 64. */
class Payload {
  constructor() {
    this.pieces = [];
    this.length = 0;
  }

  /** Adds the elements of a tensor, without copying them; returns its offset. */
  add(elements) {
    const padding = (ALIGNMENT - (this.length % ALIGNMENT)) % ALIGNMENT;
    if (padding) {
      this.pieces.push(Buffer.alloc(padding));
    }
    const offset = this.length + padding;
    this.pieces.push(Buffer.from(elements.buffer, elements.byteOffset, elements.byteLength));
    this.length = offset + elements.byteLength;
    return offset;
  }
}

/** Makes one call after the other over the bulk socket of a server. */
class FrameConnection {
  /**
   * Connects with a ticket.
   * @param issueTicket Takes the request, and returns a promise of the response of SocketService.IssueTicket.
   * @param host The host under which the server is reached over gRPC.
   * @param serialize The function that writes a gradserve.v1.Hello.
   * @param readStatus The function that reads a google.rpc.Status.
   */
  static async open(issueTicket, host, serialize, readStatus) {
    const clientId = randomUUID();
    const { ticket, addresses } = await issueTicket({ client_id: clientId });
    if (!addresses.tcp.length) {
      throw new Error('the server has no bulk socket');
    }
    const place = addresses.tcp[0];
    const socket = net.connect({ host: place.host || host, port: place.port, noDelay: true });
    const connection = new FrameConnection(socket, readStatus);
    const hello = serialize({ ticket, client_id: clientId });
    await connection.exchange([packHeader({ kind: HELLO, message: hello.length, number: PROTOCOL }), hello]);
    return connection;
  }

  constructor(socket, readStatus) {
    this.socket = socket;
    this.readStatus = readStatus;
    this.failure = null;
    this.wake = () => {};
    const fail = (error) => {
      this.failure = this.failure || error;
      this.wake();
    };
    socket.on('readable', () => this.wake());
    socket.on('error', fail);
    socket.on('end', () => fail(new Error('the server closed the connection')));
  }

  /**
   * Calls a unary method.
   * @param method The method, from the definition of its service.
   * @param request The request, whose tensors have a `payload_offset` in the payload.
   * @returns The response, and the payload beside it.
   */
  async call(method, request, payload = new Payload(), seconds = 30) {
    const name = Buffer.from(method.path.slice(1).replace('/', '.'));
    const message = method.requestSerialize(request);
    const header = packHeader({
      kind: CALL,
      name: name.length,
      message: message.length,
      payload: payload.length,
      number: BigInt(Math.round(seconds * 1e6)),
    });
    const reply = await this.exchange([header, name, message, ...payload.pieces]);
    return { response: method.responseDeserialize(reply.message), payload: reply.payload };
  }

  async exchange(buffers) {
    this.socket.cork();
    buffers.forEach((buffer) => this.socket.write(buffer));
    this.socket.uncork();
    const header = unpackHeader(await this.read(HEADER_BYTES));
    if (header.kind !== REPLY) {
      throw new Error(`expected a reply, got a frame of kind ${header.kind}`);
    }
    await this.read(header.name + header.size * SEGMENT_BYTES); // a TCP connection needs no segments
    const message = await this.read(header.message);
    const payload = await this.read(header.payload);
    if (header.code) {
      throw new CallError(this.readStatus(message));
    }
    return { message, payload };
  }

  /** Reads exactly so many bytes into one buffer. */
  async read(numBytes) {
    const result = Buffer.allocUnsafe(numBytes);
    let filled = 0;
    while (filled < numBytes) {
      const available = this.socket.readableLength;
      const part = available && this.socket.read(Math.min(available, numBytes - filled));
      if (part) {
        filled += part.copy(result, filled);
      } else if (this.failure) {
        throw this.failure;
      } else {
        await new Promise((resolve) => {
          this.wake = resolve;
        });
      }
    }
    return result;
  }

  close() {
    this.socket.destroy();
  }
}

module.exports = { CallError, FrameConnection, Payload };
