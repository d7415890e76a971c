// The command line of the workers.

#pragma once

#include <unistd.h>

#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <stdexcept>
#include <string>

#include "tensors.h"

namespace example {

using Options = std::map<std::string, std::string>;

/// Reads the command line of a worker and runs it; returns the exit code. `more` are options of this worker alone, with
/// their defaults.
inline int RunWorker(int argc, char** argv, const std::function<void(const std::string& address, Options&)>& train,
                     const Options& more = {}) {
  Options options{{"--run", "words"}, {"--worker", "cpp-" + std::to_string(getpid())},
                  {"--required", "2"}, {"--steps", "40"},
                  {"--words", "50"},   {"--output", ""}};
  options.insert(more.begin(), more.end());
  bool is_valid = argc >= 2 && argc % 2 == 0;
  for (int i = 2; is_valid && i + 1 < argc; i += 2) {
    is_valid = options.count(argv[i]) > 0;
    options[argv[i]] = argv[i + 1];
  }
  if (!is_valid) {
    std::cerr << "usage: " << argv[0]
              << " HOST:PORT [--run NAME] [--worker ID] [--required N] [--steps N] [--words N] [--output FILE]";
    for (const auto& [name, standard] : more) {
      std::cerr << " [" << name << " VALUE]";
    }
    std::cerr << std::endl;
    return 2;
  }
  try {
    train(argv[1], options);
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
  return 0;
}

/// Writes the bytes of the parameters to a file, if it has a name.
inline void Save(const Tensors& parameters, const std::string& path) {
  if (path.empty()) {
    return;
  }
  std::ofstream file(path, std::ios::binary);
  for (const Tensor& parameter : parameters) {
    file << parameter.bytes();
  }
  if (!file.flush()) {
    throw std::runtime_error("cannot write " + path);
  }
}

}  // namespace example
