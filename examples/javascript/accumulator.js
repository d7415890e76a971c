// An accumulator of several tensors by name, and the calls that a worker makes on it. Each counts exactly once.

'use strict';

const { status } = require('./server');
const {
  GRACE_SECONDS, IDLE_LEASE_SECONDS, describe, receive, send,
} = require('./calls');

const SLICE_SECONDS = 1; // after which a waiting worker looks after others

class Accumulator {
  /**
   * Creates an accumulator, or finds the one that has this name; one that differs is an error, which says in what.
   * @param caller The caller.
   * @param name The name, which all workers use.
   * @param tensors A tensor for each component by name, of its shape and type.
   * @param keepAverages How many averages can still be read.
   */
  static async open(caller, name, tensors, keepAverages = 1) {
    const components = describe(tensors);
    const { info } = await caller.server.unary(caller.server.accumulators, 'CreateAccumulator', {
      accumulator: { name },
      spec: { components, keep_averages: keepAverages },
      lifetime: { idle_lease: { seconds: IDLE_LEASE_SECONDS } },
    });
    return new Accumulator(caller, info.accumulator);
  }

  constructor(caller, { name, incarnation }) {
    this.caller = caller;
    // With the incarnation, calls end with NOT_FOUND if somebody has deleted it and made another one of this name.
    this.ref = { name, incarnation };
  }

  /** Returns the present step. */
  async step() {
    return (await this.call('GetAccumulator', {})).info.global_step;
  }

  /** Returns the number of gradients in the round. */
  async numAccumulated() {
    return (await this.call('GetNumAccumulated', {})).num_accumulated;
  }

  /** Adds a gradient to the round, and does not wait. */
  async apply(tensors, localStep) {
    return this.call('ApplyGradient', await this.contribution(tensors, localStep));
  }

  /**
   * Adds a gradient and waits for the average of its round.
   * @param whileWaiting Called about once a second until the average is there.
   * @returns Whether the gradient came too late, the accumulator's step, and the average (of the newest round then).
   */
  async pushPull(tensors, { localStep, numRequired, seconds = 60, whileWaiting = async () => {} }) {
    const request = {
      ...await this.contribution(tensors, localStep),
      num_required: numRequired,
      placement: { mode: 'MODE_AUTO' },
      timeout: { seconds: SLICE_SECONDS },
    };
    const end = Date.now() + 1000 * seconds;
    for (;;) {
      try {
        const reply = await this.call('PushPull', request, SLICE_SECONDS + GRACE_SECONDS);
        return {
          isStale: reply.outcome === 'APPLY_OUTCOME_STALE',
          step: reply.global_step,
          average: reply.average && await this.toAverage(reply.average),
        };
      } catch (error) {
        if (error.code !== status.DEADLINE_EXCEEDED || Date.now() >= end) {
          throw error;
        }
      }
      // The gradient stays in the round. The same request, with the same id, waits on.
      await whileWaiting();
    }
  }

  /** Returns the average of the round that led to a step (without one, the newest), once there is one. */
  async readAverage(step, seconds = 30) {
    const request = { step, placement: { mode: 'MODE_AUTO' }, timeout: { seconds } };
    return this.toAverage((await this.call('ReadAverage', request, seconds + GRACE_SECONDS)).average);
  }

  call(method, request, seconds) {
    const { server } = this.caller;
    return server.unary(server.accumulators, method, { accumulator: this.ref, ...request }, seconds);
  }

  async contribution(tensors, localStep) {
    return {
      request_id: this.caller.nextId(),
      local_step: localStep,
      gradient: await send(this.caller, tensors),
      worker_id: this.caller.workerId,
      release_handles: true,
    };
  }

  async toAverage({ components, step, num_gradients: numGradients, worker_ids: workerIds }) {
    return {
      tensors: await receive(this.caller, components), step, numGradients, workerIds,
    };
  }
}

module.exports = { Accumulator };
