// An accumulator of several tensors by name, and the calls that a worker makes on it. Each counts exactly once.

#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "calls.h"

namespace example {

inline constexpr int kSliceSeconds = 1;  // after which a waiting worker looks after others

/// The result of a round.
struct Average {
  Tensors tensors;
  std::int64_t step = 0;
  std::int64_t num_gradients = 0;
  std::vector<std::string> worker_ids;
};

/// What became of a gradient, the accumulator's step, and the average: that of the newest round if it was stale.
struct Pulled {
  bool is_stale = false;
  std::int64_t step = 0;
  std::optional<Average> average;
};

class Accumulator {
  using Service = wire::AccumulatorService::Stub;

 public:
  /// Creates an accumulator, or finds the one that has this name; one that differs is an error, which says in what.
  /// The tensors have the names, types and shapes of its components, and `keep_averages` can still be read.
  Accumulator(Caller& caller, const std::string& name, const Tensors& tensors, int keep_averages = 1) : caller_(caller) {
    wire::CreateAccumulatorRequest request;
    request.mutable_accumulator()->set_name(name);
    Describe(tensors, *request.mutable_spec()->mutable_components());
    request.mutable_spec()->set_keep_averages(keep_averages);
    request.mutable_lifetime()->mutable_idle_lease()->set_seconds(kIdleLeaseSeconds);
    const auto reply = Call(&Service::CreateAccumulator, request);
    ref_.set_name(name);
    // With it, calls end with NOT_FOUND if somebody has deleted the accumulator and made another one of this name.
    ref_.set_incarnation(reply.info().accumulator().incarnation());
  }

  /// Returns the present step.
  std::int64_t Step() const {
    return Call(&Service::GetAccumulator, About<wire::GetAccumulatorRequest>()).info().global_step();
  }

  /// Returns the number of gradients in the round.
  std::int64_t NumAccumulated() const {
    return Call(&Service::GetNumAccumulated, About<wire::GetNumAccumulatedRequest>()).num_accumulated();
  }

  /// Adds a gradient to the round, and does not wait.
  void Apply(const Tensors& tensors, std::int64_t local_step) {
    Call(&Service::ApplyGradient, Contribution<wire::ApplyGradientRequest>(tensors, local_step));
  }

  /// Adds a gradient and waits for the average of its round; calls `while_waiting` about once a second until then.
  Pulled PushPull(const Tensors& tensors, std::int64_t local_step, int num_required,
                  const std::function<void()>& while_waiting, Seconds limit = Seconds(60)) {
    auto request = Contribution<wire::PushPullRequest>(tensors, local_step);
    request.set_num_required(num_required);
    request.mutable_placement()->set_mode(wire::Placement::MODE_AUTO);
    request.mutable_timeout()->set_seconds(kSliceSeconds);
    const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(limit);
    for (;;) {
      try {
        const auto reply = Call(&Service::PushPull, request, Seconds(kSliceSeconds) + kGrace);
        Pulled pulled{reply.outcome() == wire::APPLY_OUTCOME_STALE, reply.global_step(), std::nullopt};
        if (reply.has_average()) {
          pulled.average = FromWire(reply.average());
        }
        return pulled;
      } catch (const CallError& error) {
        if (error.code() != grpc::StatusCode::DEADLINE_EXCEEDED || Clock::now() >= end) {
          throw;
        }
      }
      // The gradient stays in the round. The same request, with the same id, waits on.
      while_waiting();
    }
  }

  /// Returns the average of the round that led to a step (without one, the newest), once there is one.
  Average ReadAverage(std::optional<std::int64_t> step, int seconds = 30) const {
    auto request = About<wire::ReadAverageRequest>();
    if (step) {
      request.set_step(*step);
    }
    request.mutable_placement()->set_mode(wire::Placement::MODE_AUTO);
    request.mutable_timeout()->set_seconds(seconds);
    return FromWire(Call(&Service::ReadAverage, request, Seconds(seconds) + kGrace).average());
  }

 private:
  template <typename Request, typename Reply>
  Reply Call(grpc::Status (Service::*method)(grpc::ClientContext*, const Request&, Reply*), const Request& request,
             Seconds limit = kCallLimit) const {
    return caller_.server().Unary(*caller_.server().accumulators, method, request, limit);
  }

  template <typename Request>
  Request About() const {
    Request request;
    *request.mutable_accumulator() = ref_;
    return request;
  }

  template <typename Request>
  Request Contribution(const Tensors& tensors, std::int64_t local_step) {
    auto request = About<Request>();
    *request.mutable_request_id() = caller_.NextId();
    request.set_local_step(local_step);
    request.set_worker_id(caller_.worker_id());
    request.set_release_handles(true);
    Send(caller_, tensors, *request.mutable_gradient());
    return request;
  }

  Average FromWire(const wire::Average& average) const {
    return {Receive(caller_, average.components()),
            average.step(),
            average.num_gradients(),
            {average.worker_ids().begin(), average.worker_ids().end()}};
  }

  Caller& caller_;
  wire::AccumulatorRef ref_;
};

}  // namespace example
