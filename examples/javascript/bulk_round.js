// Averages two large gradients over the bulk socket of a gradserve server. Needs Node.js 18 or newer.
// From the top folder of a checkout, with a server running (`make serve`):
//
//   npm install --prefix examples/javascript
//   node examples/javascript/bulk_round.js localhost:50051

'use strict';

const { randomUUID } = require('node:crypto');
const path = require('node:path');
const { promisify } = require('node:util');
const grpc = require('@grpc/grpc-js');
const protoLoader = require('@grpc/proto-loader');
const protobuf = require('protobufjs');
const { FrameConnection, Payload } = require('./frames');

const NUM_ELEMENTS = 2_500_000; // 10 MB

const PROTO_FOLDER = path.join(__dirname, '..', '..', 'proto');
const definition = protoLoader.loadSync(
  ['gradserve/v1/accumulator_service.proto', 'gradserve/v1/socket_service.proto'],
  { includeDirs: [PROTO_FOLDER], keepCase: true, enums: String, longs: Number, defaults: true },
);
const { AccumulatorService, SocketService } = grpc.loadPackageDefinition(definition).gradserve.v1;

// Messages that no method takes: that of HELLO, and that of errors, which has the same fields as google.rpc.Status.
const plain = protobuf.parse(`
  syntax = "proto3";
  message Hello { bytes ticket = 1; string client_id = 2; }
  message Status { int32 code = 1; string message = 2; }
`, { keepCase: true }).root;
const Hello = plain.lookupType('Hello');
const Status = plain.lookupType('Status');

async function main(address) {
  const tickets = new SocketService(address, grpc.credentials.createInsecure());
  const connection = await FrameConnection.open(
    promisify(tickets.IssueTicket.bind(tickets)),
    address.replace(/:\d+$/, '').replace(/^\[|\]$/g, ''),
    (hello) => Buffer.from(Hello.encode(hello).finish()),
    (message) => Status.decode(message),
  );
  tickets.close();
  try {
    await round(connection, AccumulatorService.service);
  } finally {
    connection.close();
  }
}

async function round(connection, methods) {
  const accumulator = { name: `javascript-${randomUUID()}` };
  const spec = { components: [{ dtype: 'DATA_TYPE_FLOAT32', shape: { dims: [NUM_ELEMENTS] } }] };
  await connection.call(methods.CreateAccumulator, { accumulator, spec });
  const clientId = randomUUID();
  for (const [sequence, value] of [[1, 1], [2, 3]]) {
    const payload = new Payload();
    const dense = {
      dtype: 'DATA_TYPE_FLOAT32',
      shape: [NUM_ELEMENTS],
      payload_offset: payload.add(new Float32Array(NUM_ELEMENTS).fill(value)),
    };
    const request = { accumulator, request_id: { client_id: clientId, sequence }, gradient: [{ dense }] };
    const { response } = await connection.call(methods.ApplyGradient, request, payload);
    console.log(`applied ${payload.length / 1e6} MB: ${response.outcome}, ${response.num_accumulated} in the round`);
  }
  const take = { accumulator, request_id: { client_id: clientId, sequence: 3 }, num_required: 2 };
  const { response, payload } = await connection.call(methods.TakeGradient, take);
  const { dense } = response.average.components[0];
  const average = new Float32Array(payload.buffer, payload.byteOffset + dense.payload_offset, NUM_ELEMENTS);
  console.log(`average of ${response.average.num_gradients} gradients: ${average[0]} ... ${average[NUM_ELEMENTS - 1]}`);
  try {
    await connection.call(methods.TakeGradient, { ...take, num_required: 0, request_id: { client_id: clientId, sequence: 4 } });
  } catch (error) {
    console.log(`wrong number: ${error.code} ${grpc.status[error.code]}: ${error.message}`);
  }
  await connection.call(methods.DeleteAccumulator, { accumulator });
}

if (process.argv.length !== 3) {
  console.error('usage: node bulk_round.js HOST:PORT');
  process.exitCode = 2;
} else {
  main(process.argv[2]).catch((error) => {
    console.error(error.message);
    process.exitCode = 1;
  });
}
