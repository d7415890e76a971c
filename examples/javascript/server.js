// A gradserve server as a client of it sees it over gRPC: its services, with deadlines, retries, TLS and a token.

'use strict';

const fs = require('node:fs');
const path = require('node:path');
const { setTimeout: sleep } = require('node:timers/promises');
const grpc = require('@grpc/grpc-js');
const protoLoader = require('@grpc/proto-loader');

const CALL_SECONDS = 30;
const FIRST_PAUSE_SECONDS = 0.1;
const LONGEST_PAUSE_SECONDS = 1;

const definition = protoLoader.loadSync(
  ['accumulator', 'parameters', 'server', 'tensor'].map((name) => `gradserve/v1/${name}_service.proto`),
  {
    includeDirs: [path.join(__dirname, '..', '..', 'proto')],
    keepCase: true,
    enums: String,
    longs: Number, // exact up to 2^53, which steps, counts and sizes do not reach
    defaults: true,
    oneofs: true, // says which field of a oneof is set
  },
);
const services = grpc.loadPackageDefinition(definition).gradserve.v1;

class Server {
  /**
   * Connects, as soon as there is something to send.
   * @param address HOST:PORT.
   * @param ca File with the certificates of authorities, if the server uses TLS.
   * @param token Token, if the server has access control.
   */
  constructor(address, { ca = process.env.GRADSERVE_TLS_CA, token = process.env.GRADSERVE_TOKEN } = {}) {
    const credentials = ca ? grpc.credentials.createSsl(fs.readFileSync(ca)) : grpc.credentials.createInsecure();
    // Pings notice that a network is lost during a long wait. The server allows one each 10 s.
    const options = {
      'grpc.keepalive_time_ms': 30_000,
      'grpc.keepalive_timeout_ms': 15_000,
      // By default gRPC waits from one second to two minutes before it looks again for a server that was gone.
      'grpc.initial_reconnect_backoff_ms': 100,
      'grpc.max_reconnect_backoff_ms': 500,
    };
    this.metadata = new grpc.Metadata();
    if (token) {
      this.metadata.set('authorization', `Bearer ${token}`);
    }
    this.accumulators = new services.AccumulatorService(address, credentials, options);
    this.parameters = new services.ParameterService(address, credentials, options);
    this.tensors = new services.TensorService(address, credentials, options);
    this.info = new services.ServerService(address, credentials, options);
  }

  /** Calls a unary method of one of the services; the same request is sent again while the server is unavailable. */
  unary(service, method, request, seconds = CALL_SECONDS) {
    return withRetries(seconds, (deadline) => new Promise((resolve, reject) => {
      service[method](request, this.metadata, { deadline }, (error, reply) => (error ? reject(error) : resolve(reply)));
    }));
  }

  close() {
    [this.accumulators, this.parameters, this.tensors, this.info].forEach((service) => service.close());
  }
}

/** Repeats what fails because the server is unavailable (starting, stopping, cut off), until the seconds are over. */
async function withRetries(seconds, attempt) {
  const deadline = new Date(Date.now() + 1000 * seconds);
  for (let pause = FIRST_PAUSE_SECONDS; ; pause = Math.min(2 * pause, LONGEST_PAUSE_SECONDS)) {
    try {
      return await attempt(deadline);
    } catch (error) {
      const wait = 1000 * pause * (0.8 + 0.4 * Math.random()); // so that not all workers come back at once
      if (error.code !== grpc.status.UNAVAILABLE || Date.now() + wait >= deadline) {
        throw error;
      }
      await sleep(wait);
    }
  }
}

module.exports = { CALL_SECONDS, Server, status: grpc.status, withRetries };
