// One worker of a training run on a gradserve server; the others may be written in any language.
// Needs Node.js 18.3 or newer. From the top folder of a checkout, with a server running (`make serve`), start two:
//
//   npm install --prefix examples/javascript
//   node examples/javascript/words_worker.js localhost:50051 --run words --worker js-1 --required 2 &
//   node examples/javascript/words_worker.js localhost:50051 --run words --worker js-2 --required 2
//
// The model is a logistic regression that sorts out messages by the words in them. Every worker has messages of its own.

'use strict';

const fs = require('node:fs');
const { parseArgs } = require('node:util');
const { Server } = require('./server');
const { TrainingRun } = require('./training_run');

const NUM_MESSAGES = 200;
const MESSAGE_WORDS = 9;
// A power of two, so that an update is rounded once and has the same bits in every language.
const LEARNING_RATE = 4;

/** Makes messages: lists of word numbers. One with more even than odd numbers is unwanted. */
function makeMessages(seed, numWords) {
  let state = [...seed].reduce((sum, letter) => Math.imul(sum, 31) + letter.codePointAt(0), 7) >>> 0;
  const random = () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
  return Array.from({ length: NUM_MESSAGES }, () => {
    const words = Array.from({ length: MESSAGE_WORDS }, () => Math.floor(random() * numWords));
    return { words, isUnwanted: words.filter((word) => word % 2 === 0).length > MESSAGE_WORDS / 2 };
  });
}

/** Returns the probability that a message is unwanted. */
function predict({ weights, bias }, words) {
  const score = words.reduce((sum, word) => sum + weights.elements[word], bias.elements[0]);
  return 1 / (1 + Math.exp(-score));
}

/** Returns the gradient of the mean cross-entropy of the messages. */
function gradientOf(parameters, messages) {
  const weights = new Float32Array(parameters.weights.elements.length);
  const bias = new Float32Array(1);
  for (const { words, isUnwanted } of messages) {
    const error = (predict(parameters, words) - Number(isUnwanted)) / messages.length;
    words.forEach((word) => { weights[word] += error; });
    bias[0] += error;
  }
  return { weights: { shape: [weights.length], elements: weights }, bias: { shape: [], elements: bias } };
}

function descend(parameters, average) {
  for (const [name, { elements }] of Object.entries(parameters)) {
    average[name].elements.forEach((value, index) => { elements[index] -= LEARNING_RATE * value; });
  }
}

async function train(server, { run: name, worker, required, steps, words, output }) {
  const numWords = Number(words);
  const messages = makeMessages(worker, numWords);
  const run = await TrainingRun.join(server, name, worker, {
    weights: { shape: [numWords], elements: new Float32Array(numWords) },
    bias: { shape: [], elements: new Float32Array(1) },
  });
  console.log(`${worker}: begins at step ${run.step}`);
  let numCounted = 0;
  while (run.step < Number(steps)) {
    const gradient = gradientOf(run.parameters, messages);
    numCounted += await run.average(gradient, Number(required), (average) => descend(run.parameters, average));
  }
  const numRight = messages.filter((each) => (predict(run.parameters, each.words) > 0.5) === each.isUnwanted).length;
  console.log(`${worker}: step ${run.step}, ${numCounted} gradients counted, `
    + `${Math.round((100 * numRight) / messages.length)} % of the messages are sorted right`);
  if (output) {
    const { weights, bias } = run.parameters;
    fs.writeFileSync(output, Buffer.concat([weights, bias].map(({ elements }) => Buffer.from(elements.buffer))));
  }
}

async function main() {
  const { values, positionals } = parseArgs({
    allowPositionals: true,
    options: {
      run: { type: 'string', default: 'words' },
      worker: { type: 'string', default: `js-${process.pid}` },
      required: { type: 'string', default: '2' }, // gradients in a round
      steps: { type: 'string', default: '40' },
      words: { type: 'string', default: '50' },
      output: { type: 'string' }, // a file for the parameters
    },
  });
  if (positionals.length !== 1) {
    throw new Error('usage: node words_worker.js HOST:PORT [--run NAME] [--worker ID] [--required N] [--steps N] '
      + '[--words N] [--output FILE]');
  }
  const server = new Server(positionals[0]);
  try {
    await train(server, values);
  } finally {
    server.close();
  }
}

main().catch((error) => {
  console.error(error.message);
  process.exitCode = 1;
});
