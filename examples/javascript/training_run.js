// A training run of workers in any language: all apply the same averages in the same order to the same parameters.
//
// Besides the accumulator NAME with the gradients, a run has three small ones:
//   NAME/initial  the parameters that the first worker brought along
//   NAME/joining  requests of workers that come later
//   NAME/state    the answers: parameters, and the step that they are of

'use strict';

const { status } = require('./server');
const { Accumulator } = require('./accumulator');
const { Caller } = require('./calls');

const KEEP_AVERAGES = 8; // so many rounds a worker can be late without taking over all parameters again
const ANSWER_SECONDS = 5;
const ATTEMPTS_TO_JOIN = 6;
const NEVER_STALE = Number.MAX_SAFE_INTEGER; // requests have no step
const scalar = (value) => ({ shape: [], elements: new Float64Array([value]) });

class TrainingRun {
  /**
   * Takes part in a run: at step 0 with the parameters of its first worker, later with the present ones of the others.
   * @param name The name of the run.
   * @param workerId The id of this worker, which no other one has.
   * @param parameters Tensors by name: what training begins with if this is the first worker.
   */
  static async join(server, name, workerId, parameters) {
    const caller = await Caller.make(server, workerId);
    const run = new TrainingRun();
    run.workerId = workerId;
    run.name = name;
    run.gradients = await Accumulator.open(caller, name, parameters, KEEP_AVERAGES);
    run.initial = await Accumulator.open(caller, `${name}/initial`, parameters);
    run.joining = await Accumulator.open(caller, `${name}/joining`, { request: scalar(0) });
    run.state = await Accumulator.open(caller, `${name}/state`, { ...parameters, step: scalar(0) });
    if (await run.gradients.step() === 0) {
      // The first call ends the only round that this accumulator ever has; all others are stale, and get its average.
      const { average } = await run.initial.pushPull(parameters, { localStep: 0, numRequired: 1 });
      run.parameters = average.tensors;
      run.step = 0;
    } else {
      await run.takeState();
    }
    return run;
  }

  /**
   * Averages a gradient with those of other workers, and applies what has been averaged since this worker's step.
   * @param update Called with each average.
   * @returns Whether the gradient counted.
   */
  async average(gradient, numRequired, update) {
    const whileWaiting = () => this.answerJoining();
    const pulled = await this.gradients.pushPull(gradient, { localStep: this.step, numRequired, whileWaiting });
    if (pulled.isStale) {
      await this.catchUp(pulled.step, update);
      return false;
    }
    update(pulled.average.tensors);
    this.step = pulled.average.step;
    if (pulled.average.workerIds[0] === this.workerId) { // one worker of each round looks
      await this.answerJoining();
    }
    return true;
  }

  /** Applies the averages that this worker has missed, or takes over the state of others. */
  async catchUp(step, update) {
    try {
      while (this.step < step) {
        update((await this.gradients.readAverage(this.step + 1)).tensors);
        this.step += 1;
      }
    } catch (error) {
      if (error.code !== status.OUT_OF_RANGE) {
        throw error;
      }
      await this.takeState();
    }
  }

  /** Asks the other workers for their parameters and their step. */
  async takeState() {
    for (let attempt = 1; ; attempt += 1) {
      const before = await this.state.step();
      await this.joining.apply({ request: scalar(1) }, NEVER_STALE);
      try {
        const { step, ...parameters } = (await this.answer(before + 1)).tensors;
        this.parameters = parameters;
        [this.step] = step.elements;
        return;
      } catch (error) {
        if (error.code !== status.DEADLINE_EXCEEDED) {
          throw error;
        }
        if (attempt === ATTEMPTS_TO_JOIN) { // the worker that took the request may have ended before it answered
          throw new Error(`no worker of the run '${this.name}' answers: it is over, or all of them have ended. `
            + 'Begin a new run under another name.');
        }
      }
    }
  }

  async answer(step) {
    try {
      return await this.state.readAverage(step, ANSWER_SECONDS);
    } catch (error) {
      if (error.code !== status.OUT_OF_RANGE) {
        throw error;
      }
      return this.state.readAverage(undefined, ANSWER_SECONDS); // others have asked, too: there is a newer one
    }
  }

  /** Publishes this worker's parameters if somebody has asked for them. */
  async answerJoining() {
    if (await this.joining.numAccumulated() === 0) {
      return;
    }
    // This ends the round of the requests, for one worker alone: another one then finds its own gradient alone.
    const taken = await this.joining.pushPull({ request: scalar(0) }, { localStep: NEVER_STALE, numRequired: 1 });
    if (taken.average.numGradients > 1) {
      const tensors = { ...this.parameters, step: scalar(this.step) };
      await this.state.pushPull(tensors, { localStep: NEVER_STALE, numRequired: 1 });
    }
  }
}

module.exports = { TrainingRun };
