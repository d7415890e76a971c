// A training run of workers in any language: all apply the same averages in the same order to the same parameters.
//
// Besides the accumulator NAME with the gradients, a run has three small ones:
//   NAME/initial  the parameters that the first worker brought along
//   NAME/joining  requests of workers that come later
//   NAME/state    the answers: parameters, and the step that they are of

#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "accumulator.h"

namespace example {

inline constexpr int kKeepAverages = 8;  // so many rounds a worker can be late without taking over all parameters again
inline constexpr int kAnswerSeconds = 5;
inline constexpr int kAttemptsToJoin = 6;
inline constexpr std::int64_t kNeverStale = std::numeric_limits<std::int64_t>::max();  // requests have no step

inline Tensor Scalar(std::string name, double value) { return {std::move(name), {}, std::vector<double>{value}}; }

class TrainingRun {
 public:
  using Update = std::function<void(Tensors& parameters, const Tensors& average)>;

  /// Takes part in a run: at step 0 with the parameters of its first worker, later with the present ones of the others.
  /// `parameters` are what training begins with if this is the first worker, `update` applies an average to them, and no
  /// other worker has this `worker_id`.
  TrainingRun(const Server& server, const std::string& name, const std::string& worker_id, const Tensors& parameters,
              Update update)
      : name_(name),
        update_(std::move(update)),
        caller_(server, worker_id),
        gradients_(caller_, name, parameters, kKeepAverages),
        joining_(caller_, name + "/joining", {Scalar("request", 0)}),
        state_(caller_, name + "/state", WithStep(parameters, 0)),
        parameters_(parameters) {
    Accumulator initial(caller_, name + "/initial", parameters);
    if (gradients_.Step() == 0) {
      // The first call ends the only round that this accumulator ever has; all others are stale, and get its average.
      parameters_ = Select(initial.PushPull(parameters, 0, 1, [] {}).average.value().tensors, parameters);
    } else {
      TakeState();
    }
  }

  std::int64_t step() const { return step_; }
  const Tensors& parameters() const { return parameters_; }

  /// Averages a gradient with those of other workers, and applies what has been averaged since this worker's step.
  /// Returns whether the gradient counted.
  bool Average(const Tensors& gradient, int num_required) {
    const Pulled pulled = gradients_.PushPull(gradient, step_, num_required, [this] { AnswerJoining(); });
    if (pulled.is_stale) {
      CatchUp(pulled.step);
      return false;
    }
    update_(parameters_, pulled.average->tensors);
    step_ = pulled.average->step;
    if (pulled.average->worker_ids.front() == caller_.worker_id()) {  // one worker of each round looks
      AnswerJoining();
    }
    return true;
  }

 private:
  /// Applies the averages that this worker has missed, or takes over the state of others.
  void CatchUp(std::int64_t step) {
    try {
      while (step_ < step) {
        update_(parameters_, gradients_.ReadAverage(step_ + 1).tensors);
        ++step_;
      }
    } catch (const CallError& error) {
      if (error.code() != grpc::StatusCode::OUT_OF_RANGE) {
        throw;
      }
      TakeState();
    }
  }

  /// Asks the other workers for their parameters and their step.
  void TakeState() {
    for (int attempt = 1; attempt <= kAttemptsToJoin; ++attempt) {
      const std::int64_t before = state_.Step();
      joining_.Apply({Scalar("request", 1)}, kNeverStale);
      try {
        const Tensors state = Answer(before + 1).tensors;
        step_ = static_cast<std::int64_t>(std::get<std::vector<double>>(Find(state, "step").elements)[0]);
        parameters_ = Select(state, parameters_);
        return;
      } catch (const CallError& error) {
        // The worker that took the request may have ended before it answered.
        if (error.code() != grpc::StatusCode::DEADLINE_EXCEEDED) {
          throw;
        }
      }
    }
    throw std::runtime_error("no worker of the run '" + name_ +
                             "' answers: it is over, or all of them have ended. Begin a new run under another name.");
  }

  example::Average Answer(std::int64_t step) const {
    try {
      return state_.ReadAverage(step, kAnswerSeconds);
    } catch (const CallError& error) {
      if (error.code() != grpc::StatusCode::OUT_OF_RANGE) {
        throw;
      }
      return state_.ReadAverage(std::nullopt, kAnswerSeconds);  // others have asked, too: there is a newer one
    }
  }

  /// Publishes this worker's parameters if somebody has asked for them.
  void AnswerJoining() {
    if (joining_.NumAccumulated() == 0) {
      return;
    }
    // This ends the round of the requests, for one worker alone: another one then finds its own gradient alone.
    const Pulled taken = joining_.PushPull({Scalar("request", 0)}, kNeverStale, 1, [] {});
    if (taken.average->num_gradients > 1) {
      state_.PushPull(WithStep(parameters_, step_), kNeverStale, 1, [] {});
    }
  }

  static Tensors WithStep(Tensors parameters, std::int64_t step) {
    parameters.push_back(Scalar("step", static_cast<double>(step)));
    return parameters;
  }

  std::string name_;
  Update update_;
  Caller caller_;
  Accumulator gradients_;
  Accumulator joining_;
  Accumulator state_;
  Tensors parameters_;
  std::int64_t step_ = 0;
};

}  // namespace example
