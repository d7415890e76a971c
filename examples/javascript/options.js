// The command line of the workers, and the file for their parameters.

'use strict';

const fs = require('node:fs');
const { basename } = require('node:path');
const { parseArgs } = require('node:util');
const { Server } = require('./server');

/** Reads the command line of a worker and runs it, with a connection to the server and its options. */
async function runWorker(train) {
  const { values, positionals } = parseArgs({
    allowPositionals: true,
    options: {
      run: { type: 'string', default: 'words' },
      worker: { type: 'string', default: `js-${process.pid}` },
      required: { type: 'string', default: '2' }, // gradients in a round
      steps: { type: 'string', default: '40' },
      words: { type: 'string', default: '50' },
      output: { type: 'string' }, // a file for the parameters
      codec: { type: 'string' }, // of gradients, for parameters_worker alone
    },
  });
  if (positionals.length !== 1) {
    throw new Error(`usage: node ${basename(process.argv[1])} HOST:PORT [--run NAME] [--worker ID] [--required N] `
      + '[--steps N] [--words N] [--output FILE]');
  }
  const server = new Server(positionals[0]);
  try {
    const numbers = ['required', 'steps', 'words'].map((name) => [name, Number(values[name])]);
    await train(server, { ...values, ...Object.fromEntries(numbers) });
  } finally {
    server.close();
  }
}

/** Runs a worker until its end; an error becomes one line and the exit code 1. */
function run(train) {
  runWorker(train).catch((error) => {
    console.error(error.message);
    process.exitCode = 1;
  });
}

/** Writes the bytes of the parameters to a file, if it has a name. */
function save({ weights, bias }, output) {
  if (output) {
    fs.writeFileSync(output, Buffer.concat([weights, bias].map(({ elements }) => Buffer.from(elements.buffer))));
  }
}

module.exports = { run, save };
