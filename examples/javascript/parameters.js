// Parameters that the server holds: a worker reads a version, and pushes gradients, of which an optimizer on the server
// makes the next version at the end of each round.

'use strict';

const {
  GRACE_SECONDS, IDLE_LEASE_SECONDS, describe, receive, send,
} = require('./calls');
const { status } = require('./server');

const ROUND_SECONDS = 60; // for which a worker waits for the others

class Parameters {
  /**
   * Finds the parameters of a name, or creates them with these values; then the optimizer and the number of gradients in
   * a round are those of this worker, too.
   * @param caller The caller.
   * @param name The name, which all workers use.
   * @param values Tensors by name.
   * @param optimizer An Optimizer as the protos have it. All of its numbers are taken as they are sent.
   * @param numRequired The number of gradients that end a round.
   * @param packing One of CODECS, in which gradients take fewer bytes; undefined to send them as they are.
   */
  static async open(caller, name, values, { optimizer, numRequired, packing }) {
    const request = {
      parameters: { name },
      spec: {
        components: describe(values),
        update: 'UPDATE_KIND_GRADIENT',
        optimizer,
        rounds: { num_required: numRequired },
      },
      lifetime: { idle_lease: { seconds: IDLE_LEASE_SECONDS } },
      release_handles: true,
    };
    const create = (more) => caller.server.unary(caller.server.parameters, 'CreateParameters', { ...request, ...more });
    let reply;
    try {
      reply = await create({});
    } catch (error) {
      if (error.code !== status.NOT_FOUND) {
        throw error;
      }
      reply = await create({ values: await send(caller, values) }); // which only the first worker needs to do
    }
    return new Parameters(caller, reply.info.parameters, packing);
  }

  constructor(caller, ref, packing) {
    this.caller = caller;
    this.ref = ref;
    this.packing = packing;
  }

  /** Returns the newest version. That is all there is to joining late. */
  async read() {
    return this.toVersion((await this.call('ReadParameters', {})).version);
  }

  /**
   * Pushes a gradient, computed from the version of a step, and waits for the end of its round.
   * @returns Whether it counted, and the version to go on from: that of its round, or the newest if it was stale.
   */
  async pushPull(gradient, localStep) {
    const request = {
      request_id: this.caller.nextId(),
      local_step: localStep,
      update: await send(this.caller, gradient, this.packing),
      worker_id: this.caller.workerId,
      release_handles: true,
      timeout: { seconds: ROUND_SECONDS },
    };
    const { outcome, version } = await this.call('PushPullParameters', request, ROUND_SECONDS + GRACE_SECONDS);
    return { isCounted: outcome !== 'APPLY_OUTCOME_STALE', version: await this.toVersion(version) };
  }

  call(method, request, seconds) {
    const { server } = this.caller;
    const about = { parameters: this.ref, placement: { mode: 'MODE_AUTO' } };
    return server.unary(server.parameters, method, { ...about, ...request }, seconds);
  }

  async toVersion({ components, step, digest }) {
    return { tensors: await receive(this.caller, components), step, digest: digest.toString('hex') };
  }
}

/** Returns the settings of Adam. */
const adam = (lr) => ({ adam: { lr, beta1: 0.9, beta2: 0.999, eps: 1e-8 } });

module.exports = { Parameters, adam };
