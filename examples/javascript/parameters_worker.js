// One worker of a training run whose parameters a gradserve server holds; the others may be written in any language.
// Needs Node.js 18.3 or newer. From the top folder of a checkout, with a server running (`make serve`), start two:
//
//   npm install --prefix examples/javascript
//   node examples/javascript/parameters_worker.js localhost:50051 --run words --worker js-1 --required 2 &
//   node examples/javascript/parameters_worker.js localhost:50051 --run words --worker js-2 --required 2
//
// The model is a logistic regression that sorts out messages by the words in them. Every worker has messages of its own.
// With `--codec int8`, gradients take a quarter of the bytes.

'use strict';

const { Caller } = require('./calls');
const { CODECS } = require('./codecs');
const { run, save } = require('./options');
const { Parameters, adam } = require('./parameters');
const {
  gradientOf, makeMessages, percentRight, zeros,
} = require('./words');

run(async (server, {
  run: name, worker, required, steps, words, output, codec,
}) => {
  const packing = codec && CODECS[codec];
  if (codec && !packing) {
    throw new Error(`expected a codec out of ${Object.keys(CODECS)}, got ${codec}`);
  }
  const messages = makeMessages(worker, words);
  const caller = await Caller.make(server, worker);
  const rules = { optimizer: adam(0.1), numRequired: required, packing };
  const parameters = await Parameters.open(caller, name, zeros(words), rules);
  let version = await parameters.read();
  console.log(`${worker}: begins at step ${version.step}`);
  let numCounted = 0;
  while (version.step < steps) {
    const pushed = await parameters.pushPull(gradientOf(version.tensors, messages), version.step);
    numCounted += pushed.isCounted;
    version = pushed.version;
  }
  console.log(`${worker}: step ${version.step}, ${numCounted} gradients counted, digest ${version.digest}, `
    + `${percentRight(version.tensors, messages)} % of the messages are sorted right`);
  save(version.tensors, output);
});
