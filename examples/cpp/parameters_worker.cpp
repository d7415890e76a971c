// One worker of a training run whose parameters a gradserve server holds; the others may be written in any language.
// README.md says how to build and start it.
//
// The model is a logistic regression that sorts out messages by the words in them. Every worker has messages of its own.
// With `--codec int8`, gradients take a quarter of the bytes.

#include <iostream>

#include "options.h"
#include "parameters.h"
#include "words.h"

namespace {

void Train(const std::string& address, example::Options& options) {
  const std::string& worker = options["--worker"];
  const auto zeros = example::MakeParameters(std::stoul(options["--words"]));
  const auto messages = example::MakeMessages(worker, std::stoul(options["--words"]));
  const example::Server server(address);
  example::Caller caller(server, worker);
  example::Parameters parameters(caller, options["--run"], zeros, example::Adam(0.1),
                                 std::stoi(options["--required"]), example::CodecOf(options["--codec"]));
  auto version = parameters.Read();
  std::cout << worker << ": begins at step " << version.step << std::endl;
  int num_counted = 0;
  while (version.step < std::stol(options["--steps"])) {
    auto pushed = parameters.PushPull(example::GradientOf(version.tensors, messages), version.step);
    num_counted += pushed.counted;
    version = std::move(pushed.version);
  }
  std::cout << worker << ": step " << version.step << ", " << num_counted << " gradients counted, digest "
            << version.digest << ", " << example::PercentRight(version.tensors, messages)
            << " % of the messages are sorted right" << std::endl;
  example::Save(example::Select(version.tensors, zeros), options["--output"]);
}

}  // namespace

int main(int argc, char** argv) { return example::RunWorker(argc, argv, Train, {{"--codec", ""}}); }
