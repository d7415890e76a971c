// A gradserve server as a client of it sees it over gRPC: its services, with deadlines, retries, TLS and a token.

#pragma once

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>

#include "gradserve/v1/accumulator_service.grpc.pb.h"
#include "gradserve/v1/parameters_service.grpc.pb.h"
#include "gradserve/v1/server_service.grpc.pb.h"
#include "gradserve/v1/tensor_service.grpc.pb.h"

namespace example {

namespace wire = gradserve::v1;
using Clock = std::chrono::system_clock;
using Seconds = std::chrono::duration<double>;

inline constexpr Seconds kCallLimit{30};
inline constexpr Seconds kFirstPause{0.1};
inline constexpr Seconds kLongestPause{1};

/// An answer of the server, or of gRPC if there was none, that is an error.
class CallError : public std::runtime_error {
 public:
  explicit CallError(const grpc::Status& status)
      : std::runtime_error(status.error_message()), code_(status.error_code()) {}
  grpc::StatusCode code() const { return code_; }

 private:
  grpc::StatusCode code_;
};

/// The value of an environment variable; empty if there is none.
inline std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

inline std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw std::runtime_error("cannot read " + path);
  }
  return {std::istreambuf_iterator<char>(file), {}};
}

class Server {
 public:
  /// Connects, as soon as there is something to send. GRADSERVE_TLS_CA names a file with the certificates of authorities
  /// if the server uses TLS; GRADSERVE_TOKEN is a token if it has access control.
  explicit Server(const std::string& address) : token_(Variable("GRADSERVE_TOKEN")) {
    std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
    if (const std::string ca = Variable("GRADSERVE_TLS_CA"); !ca.empty()) {
      grpc::SslCredentialsOptions options;
      options.pem_root_certs = ReadFile(ca);
      credentials = grpc::SslCredentials(options);
    }
    grpc::ChannelArguments arguments;
    // Pings notice that a network is lost during a long wait. The server allows one each 10 s.
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 15'000);
    // By default gRPC waits from one second to two minutes before it looks again for a server that was gone.
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 500);
    channel_ = grpc::CreateCustomChannel(address, credentials, arguments);
    accumulators = wire::AccumulatorService::NewStub(channel_);
    parameters = wire::ParameterService::NewStub(channel_);
    tensors = wire::TensorService::NewStub(channel_);
    info = wire::ServerService::NewStub(channel_);
  }

  /// Calls a unary method of one of the services; the same request is sent again while the server is unavailable.
  template <typename Stub, typename Request, typename Reply>
  Reply Unary(Stub& service, grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Reply*),
              const Request& request, Seconds limit = kCallLimit) const {
    Reply reply;
    WithRetries(limit, [&](grpc::ClientContext& context) { return (service.*method)(&context, request, &reply); });
    return reply;
  }

  /// Repeats what fails because the server is unavailable (starting, stopping, cut off), until the time is over.
  /// Throws CallError for any other failure.
  template <typename Attempt>
  void WithRetries(Seconds limit, Attempt attempt) const {
    const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(limit);
    std::minstd_rand random{std::random_device{}()};
    for (Seconds pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
      grpc::ClientContext context;
      context.set_deadline(deadline);
      if (!token_.empty()) {
        context.AddMetadata("authorization", "Bearer " + token_);
      }
      const grpc::Status status = attempt(context);
      if (status.ok()) {
        return;
      }
      // Not all workers come back at once.
      const Seconds wait = pause * std::uniform_real_distribution<>(0.8, 1.2)(random);
      const auto next = Clock::now() + std::chrono::duration_cast<Clock::duration>(wait);
      if (status.error_code() != grpc::StatusCode::UNAVAILABLE || next >= deadline) {
        throw CallError(status);
      }
      channel_->WaitForConnected(next);  // connections are made in the threads that wait for something of a channel
      std::this_thread::sleep_until(next);
    }
  }

  std::unique_ptr<wire::AccumulatorService::Stub> accumulators;
  std::unique_ptr<wire::ParameterService::Stub> parameters;
  std::unique_ptr<wire::TensorService::Stub> tensors;
  std::unique_ptr<wire::ServerService::Stub> info;

 private:
  std::string token_;
  std::shared_ptr<grpc::Channel> channel_;
};

}  // namespace example
