// The model of the workers: a logistic regression that sorts out messages by the words in them.

'use strict';

const NUM_MESSAGES = 200;
const MESSAGE_WORDS = 9;

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

/** Returns parameters that are zero. */
function zeros(numWords) {
  return {
    weights: { shape: [numWords], elements: new Float32Array(numWords) },
    bias: { shape: [], elements: new Float32Array(1) },
  };
}

/** Returns how many of a hundred messages the parameters sort right. */
function percentRight(parameters, messages) {
  const numRight = messages.filter((each) => (predict(parameters, each.words) > 0.5) === each.isUnwanted).length;
  return Math.round((100 * numRight) / messages.length);
}

module.exports = {
  gradientOf, makeMessages, percentRight, zeros,
};
