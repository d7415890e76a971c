// Parameters that the server holds: a worker reads a version, and pushes gradients, of which an optimizer on the server
// makes the next version at the end of each round.

#pragma once

#include <cstdint>
#include <iomanip>
#include <sstream>
#include <string>

#include "calls.h"

namespace example {

inline constexpr Seconds kRoundLimit{60};  // for which a worker waits for the others

/// Parameters as they were at one step.
struct Version {
  Tensors tensors;
  std::int64_t step = 0;
  std::string digest;  // equal digests: equal parameters
};

/// What became of a gradient, and the version to go on from: that of its round, or the newest if it was stale.
struct Pushed {
  bool counted = false;
  Version version;
};

class Parameters {
  using Service = wire::ParameterService::Stub;

 public:
  /// Finds the parameters of a name, or creates them with these values; then the optimizer and the number of gradients in
  /// a round are those of this worker, too. With a codec, gradients take fewer bytes.
  Parameters(Caller& caller, const std::string& name, const Tensors& values, const wire::Optimizer& optimizer,
             int num_required, wire::Codec codec = wire::CODEC_UNSPECIFIED)
      : caller_(caller), codec_(codec) {
    wire::CreateParametersRequest request;
    request.mutable_parameters()->set_name(name);
    Describe(values, *request.mutable_spec()->mutable_components());
    request.mutable_spec()->set_update(wire::UPDATE_KIND_GRADIENT);
    *request.mutable_spec()->mutable_optimizer() = optimizer;
    request.mutable_spec()->mutable_rounds()->set_num_required(num_required);
    request.mutable_lifetime()->mutable_idle_lease()->set_seconds(kIdleLeaseSeconds);
    request.set_release_handles(true);
    try {
      ref_ = Call(&Service::CreateParameters, request).info().parameters();
    } catch (const CallError& error) {
      if (error.code() != grpc::StatusCode::NOT_FOUND) {
        throw;
      }
      Send(caller_, values, *request.mutable_values());  // which only the first worker needs to do
      ref_ = Call(&Service::CreateParameters, request).info().parameters();
    }
  }

  /// Returns the newest version. That is all there is to joining late.
  Version Read() const {
    wire::ReadParametersRequest request;
    *request.mutable_parameters() = ref_;
    request.mutable_placement()->set_mode(wire::Placement::MODE_AUTO);
    return FromWire(Call(&Service::ReadParameters, request).version());
  }

  /// Pushes a gradient, computed from the version of a step, and waits for the version that its round makes.
  Pushed PushPull(const Tensors& gradient, std::int64_t local_step) {
    wire::PushPullParametersRequest request;
    *request.mutable_parameters() = ref_;
    *request.mutable_request_id() = caller_.NextId();
    request.set_local_step(local_step);
    request.set_worker_id(caller_.worker_id());
    Send(caller_, gradient, *request.mutable_update(), codec_);
    request.set_release_handles(true);
    request.mutable_placement()->set_mode(wire::Placement::MODE_AUTO);
    request.mutable_timeout()->set_seconds(static_cast<std::int64_t>(kRoundLimit.count()));
    const auto reply = Call(&Service::PushPullParameters, request, kRoundLimit + kGrace);
    return {reply.outcome() != wire::APPLY_OUTCOME_STALE, FromWire(reply.version())};
  }

 private:
  template <typename Request, typename Reply>
  Reply Call(grpc::Status (Service::*method)(grpc::ClientContext*, const Request&, Reply*), const Request& request,
             Seconds limit = kCallLimit) const {
    return caller_.server().Unary(*caller_.server().parameters, method, request, limit);
  }

  Version FromWire(const wire::Version& version) const {
    std::ostringstream digest;
    for (const unsigned char byte : version.digest()) {
      digest << std::hex << std::setw(2) << std::setfill('0') << static_cast<int>(byte);
    }
    return {Receive(caller_, version.components()), version.step(), digest.str()};
  }

  Caller& caller_;
  wire::Codec codec_;
  wire::ParametersRef ref_;
};

/// Returns the settings of Adam. All numbers of an optimizer are taken as they are sent.
inline wire::Optimizer Adam(double lr) {
  wire::Optimizer optimizer;
  wire::Adam& adam = *optimizer.mutable_adam();
  adam.set_lr(lr);
  adam.set_beta1(0.9);
  adam.set_beta2(0.999);
  adam.set_eps(1e-8);
  return optimizer;
}

}  // namespace example
