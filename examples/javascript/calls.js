// What all calls of a worker have in common: who makes them, and the tensors that they carry by name.

'use strict';

const { randomUUID } = require('node:crypto');
const { dtypeOf, fromWire, toWire } = require('./tensors');

const IDLE_LEASE_SECONDS = 3600; // what nobody has used for so long ends by itself
const GRACE_SECONDS = 10; // for the server's own answer that it has waited long enough, which says who is missing

/** Who makes the calls. Calls are numbered upwards; one that is sent again keeps its number. */
class Caller {
  constructor(server, workerId, inlineLimit) {
    this.server = server;
    this.workerId = workerId;
    this.inlineLimit = inlineLimit;
    this.clientId = randomUUID();
    this.sequence = 0;
  }

  static async make(server, workerId) {
    const { limits } = await server.unary(server.info, 'GetServerInfo', {});
    return new Caller(server, workerId, limits.inline_limit_bytes);
  }

  nextId() {
    this.sequence += 1;
    return { client_id: this.clientId, sequence: this.sequence };
  }
}

/** Describes tensors: their names, types and shapes. */
function describe(tensors) {
  return Object.entries(tensors).map(([name, { shape, elements }]) => (
    { name, dtype: dtypeOf(elements), shape: { dims: shape } }
  ));
}

/**
 * Converts tensors to the components of a request; large ones are uploaded first.
 * @param caller The caller.
 * @param tensors Tensors by name.
 * @param packing One of CODECS; undefined to send them as they are.
 */
async function send(caller, tensors, packing) {
  const sent = packing ? Object.values(tensors).map(packing.pack) : Object.values(tensors);
  const values = await toWire(caller.server, sent, caller.inlineLimit);
  return Object.keys(tensors).map((name, index) => (
    packing ? { name, packed: { codec: packing.codec, data: values[index] } } : { name, dense: values[index] }
  ));
}

/** Converts the components of a reply to tensors by name; large ones are downloaded. */
async function receive(caller, components) {
  const tensors = await fromWire(caller.server, components.map(({ dense }) => dense));
  return Object.fromEntries(components.map(({ name }, index) => [name, tensors[index]]));
}

module.exports = {
  Caller, GRACE_SECONDS, IDLE_LEASE_SECONDS, describe, receive, send,
};
