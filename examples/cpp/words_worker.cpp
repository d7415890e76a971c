// One worker of a training run on a gradserve server, with parameters of its own that it keeps equal to those of the
// others, which may be written in any language. README.md says how to build and start it.
//
// The model is a logistic regression that sorts out messages by the words in them. Every worker has messages of its own.

#include <iostream>

#include "options.h"
#include "training_run.h"
#include "words.h"

namespace {

using example::Find;
using example::Tensor;
using example::Tensors;

// A power of two, so that an update is rounded once and has the same bits in every language.
constexpr float kLearningRate = 4;

void Descend(Tensors& parameters, const Tensors& average) {
  for (Tensor& parameter : parameters) {
    const std::vector<float>& slope = Find(average, parameter.name).floats();
    for (std::size_t i = 0; i < slope.size(); ++i) {
      parameter.floats()[i] -= kLearningRate * slope[i];
    }
  }
}

void Train(const std::string& address, example::Options& options) {
  const std::string& worker = options["--worker"];
  const std::size_t num_words = std::stoul(options["--words"]);
  const auto messages = example::MakeMessages(worker, num_words);
  const example::Server server(address);
  example::TrainingRun run(server, options["--run"], worker, example::MakeParameters(num_words), Descend);
  std::cout << worker << ": begins at step " << run.step() << std::endl;
  int num_counted = 0;
  while (run.step() < std::stol(options["--steps"])) {
    num_counted += run.Average(example::GradientOf(run.parameters(), messages), std::stoi(options["--required"]));
  }
  std::cout << worker << ": step " << run.step() << ", " << num_counted << " gradients counted, "
            << example::PercentRight(run.parameters(), messages) << " % of the messages are sorted right" << std::endl;
  example::Save(run.parameters(), options["--output"]);
}

}  // namespace

int main(int argc, char** argv) { return example::RunWorker(argc, argv, Train); }
