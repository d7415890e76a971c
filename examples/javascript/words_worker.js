// One worker of a training run on a gradserve server, with parameters of its own that it keeps equal to those of the
// others, which may be written in any language.
// Needs Node.js 18.3 or newer. From the top folder of a checkout, with a server running (`make serve`), start two:
//
//   npm install --prefix examples/javascript
//   node examples/javascript/words_worker.js localhost:50051 --run words --worker js-1 --required 2 &
//   node examples/javascript/words_worker.js localhost:50051 --run words --worker js-2 --required 2
//
// The model is a logistic regression that sorts out messages by the words in them. Every worker has messages of its own.

'use strict';

const { run, save } = require('./options');
const { TrainingRun } = require('./training_run');
const {
  gradientOf, makeMessages, percentRight, zeros,
} = require('./words');

// A power of two, so that an update is rounded once and has the same bits in every language.
const LEARNING_RATE = 4;

function descend(parameters, average) {
  for (const [name, { elements }] of Object.entries(parameters)) {
    average[name].elements.forEach((value, index) => { elements[index] -= LEARNING_RATE * value; });
  }
}

run(async (server, {
  run: name, worker, required, steps, words, output,
}) => {
  const messages = makeMessages(worker, words);
  const training = await TrainingRun.join(server, name, worker, zeros(words));
  console.log(`${worker}: begins at step ${training.step}`);
  let numCounted = 0;
  while (training.step < steps) {
    const gradient = gradientOf(training.parameters, messages);
    numCounted += await training.average(gradient, required, (average) => descend(training.parameters, average));
  }
  console.log(`${worker}: step ${training.step}, ${numCounted} gradients counted, `
    + `${percentRight(training.parameters, messages)} % of the messages are sorted right`);
  save(training.parameters, output);
});
