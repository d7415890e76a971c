// The model of the workers: a logistic regression that sorts out messages by the words in them.

#pragma once

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "tensors.h"

namespace example {

inline constexpr int kNumMessages = 200;
inline constexpr int kMessageWords = 9;

struct Message {
  std::vector<std::size_t> words;  // their numbers
  bool is_unwanted;                // there are more even than odd ones
};

/// Makes the messages of one worker.
inline std::vector<Message> MakeMessages(const std::string& seed, std::size_t num_words) {
  std::seed_seq sequence(seed.begin(), seed.end());
  std::mt19937 random(sequence);
  std::uniform_int_distribution<std::size_t> word(0, num_words - 1);
  std::vector<Message> messages(kNumMessages);
  for (Message& message : messages) {
    int num_even = 0;
    for (int i = 0; i < kMessageWords; ++i) {
      message.words.push_back(word(random));
      num_even += message.words.back() % 2 == 0;
    }
    message.is_unwanted = 2 * num_even > kMessageWords;
  }
  return messages;
}

/// Returns parameters that are zero, and have room for a gradient.
inline Tensors MakeParameters(std::size_t num_words) {
  return {MakeTensor("weights", wire::DATA_TYPE_FLOAT32, {static_cast<std::int64_t>(num_words)}),
          MakeTensor("bias", wire::DATA_TYPE_FLOAT32, {})};
}

/// Returns the probability that a message is unwanted.
inline double Predict(const Tensors& parameters, const Message& message) {
  const std::vector<float>& weights = Find(parameters, "weights").floats();
  double score = Find(parameters, "bias").floats()[0];
  for (const std::size_t word : message.words) {
    score += weights[word];
  }
  return 1 / (1 + std::exp(-score));
}

/// Returns the gradient of the mean cross-entropy of the messages.
inline Tensors GradientOf(const Tensors& parameters, const std::vector<Message>& messages) {
  Tensors gradient = MakeParameters(Find(parameters, "weights").floats().size());
  std::vector<float>& weights = gradient[0].floats();
  float& bias = gradient[1].floats()[0];
  for (const Message& message : messages) {
    const double error = (Predict(parameters, message) - message.is_unwanted) / messages.size();
    for (const std::size_t word : message.words) {
      weights[word] += error;
    }
    bias += error;
  }
  return gradient;
}

/// Returns how many of a hundred messages the parameters sort right.
inline long PercentRight(const Tensors& parameters, const std::vector<Message>& messages) {
  int num_right = 0;
  for (const Message& message : messages) {
    num_right += (Predict(parameters, message) > 0.5) == message.is_unwanted;
  }
  return std::lround(100.0 * num_right / messages.size());
}

}  // namespace example
