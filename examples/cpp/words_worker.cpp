// One worker of a training run on a gradserve server; the others may be written in any language. README.md says how to
// build and start it.
//
// The model is a logistic regression that sorts out messages by the words in them. Every worker has messages of its own.

#include <unistd.h>

#include <cmath>
#include <fstream>
#include <iostream>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "training_run.h"

namespace {

using example::Find;
using example::MakeTensor;
using example::Tensor;
using example::Tensors;

constexpr int kNumMessages = 200;
constexpr int kMessageWords = 9;
// A power of two, so that an update is rounded once and has the same bits in every language.
constexpr float kLearningRate = 4;

constexpr char kUsage[] =
    "usage: words_worker HOST:PORT [--run NAME] [--worker ID] [--required N] [--steps N] [--words N] [--output FILE]";

struct Message {
  std::vector<std::size_t> words;  // their numbers
  bool is_unwanted;                // there are more even than odd ones
};

std::vector<Message> MakeMessages(const std::string& seed, std::size_t num_words) {
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
Tensors MakeParameters(std::size_t num_words) {
  return {MakeTensor("weights", gradserve::v1::DATA_TYPE_FLOAT32, {static_cast<std::int64_t>(num_words)}),
          MakeTensor("bias", gradserve::v1::DATA_TYPE_FLOAT32, {})};
}

/// Returns the probability that a message is unwanted.
double Predict(const Tensors& parameters, const Message& message) {
  const std::vector<float>& weights = Find(parameters, "weights").floats();
  double score = Find(parameters, "bias").floats()[0];
  for (const std::size_t word : message.words) {
    score += weights[word];
  }
  return 1 / (1 + std::exp(-score));
}

/// Returns the gradient of the mean cross-entropy of the messages.
Tensors GradientOf(const Tensors& parameters, const std::vector<Message>& messages) {
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

void Descend(Tensors& parameters, const Tensors& average) {
  for (Tensor& parameter : parameters) {
    const std::vector<float>& slope = Find(average, parameter.name).floats();
    for (std::size_t i = 0; i < slope.size(); ++i) {
      parameter.floats()[i] -= kLearningRate * slope[i];
    }
  }
}

void Train(const std::string& address, std::map<std::string, std::string>& options) {
  const std::string& worker = options["--worker"];
  const std::size_t num_words = std::stoul(options["--words"]);
  const auto messages = MakeMessages(worker, num_words);
  const example::Server server(address);
  example::TrainingRun run(server, options["--run"], worker, MakeParameters(num_words), Descend);
  std::cout << worker << ": begins at step " << run.step() << std::endl;
  int num_counted = 0;
  while (run.step() < std::stol(options["--steps"])) {
    num_counted += run.Average(GradientOf(run.parameters(), messages), std::stoi(options["--required"]));
  }
  int num_right = 0;
  for (const Message& message : messages) {
    num_right += (Predict(run.parameters(), message) > 0.5) == message.is_unwanted;
  }
  std::cout << worker << ": step " << run.step() << ", " << num_counted << " gradients counted, "
            << std::lround(100.0 * num_right / kNumMessages) << " % of the messages are sorted right" << std::endl;
  if (const std::string& output = options["--output"]; !output.empty()) {
    std::ofstream file(output, std::ios::binary);
    for (const Tensor& parameter : run.parameters()) {
      file << parameter.bytes();
    }
    if (!file.flush()) {
      throw std::runtime_error("cannot write " + output);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::map<std::string, std::string> options{{"--run", "words"},  {"--worker", "cpp-" + std::to_string(getpid())},
                                             {"--required", "2"}, {"--steps", "40"},
                                             {"--words", "50"},   {"--output", ""}};
  for (int i = 2; i + 1 < argc; i += 2) {
    if (options.count(argv[i]) == 0) {
      std::cerr << kUsage << std::endl;
      return 2;
    }
    options[argv[i]] = argv[i + 1];
  }
  if (argc % 2 != 0 || argc < 2) {
    std::cerr << kUsage << std::endl;
    return 2;
  }
  try {
    Train(argv[1], options);
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
  return 0;
}
