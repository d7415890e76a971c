// What all calls of a worker have in common: who makes them, and the tensors that they carry by name, packed or not.

#pragma once

#include <cstdint>
#include <iomanip>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "codecs.h"
#include "tensors.h"

namespace example {

inline constexpr int kIdleLeaseSeconds = 3600;  // what nobody has used for so long ends by itself
inline constexpr Seconds kGrace{10};  // for the server's own answer that it has waited long enough: it says who is missing

/// Who makes the calls. Calls are numbered upwards; one that is sent again keeps its number.
class Caller {
 public:
  Caller(const Server& server, std::string worker_id) : server_(server), worker_id_(std::move(worker_id)) {
    std::random_device random;
    std::ostringstream id;
    for (int i = 0; i < 4; ++i) {
      id << std::hex << std::setw(8) << std::setfill('0') << random();
    }
    client_id_ = id.str();
    const auto reply = server.Unary(*server.info, &wire::ServerService::Stub::GetServerInfo, wire::GetServerInfoRequest());
    inline_limit_ = reply.limits().inline_limit_bytes();
  }

  wire::RequestId NextId() {
    wire::RequestId id;
    id.set_client_id(client_id_);
    id.set_sequence(++sequence_);
    return id;
  }

  const Server& server() const { return server_; }
  const std::string& worker_id() const { return worker_id_; }
  std::int64_t inline_limit() const { return inline_limit_; }

 private:
  const Server& server_;
  std::string worker_id_;
  std::string client_id_;
  std::uint64_t sequence_ = 0;
  std::int64_t inline_limit_ = 0;
};

/// Describes tensors: their names, types and shapes.
inline void Describe(const Tensors& tensors, google::protobuf::RepeatedPtrField<wire::ComponentSpec>& components) {
  for (const Tensor& tensor : tensors) {
    wire::ComponentSpec* component = components.Add();
    component->set_name(tensor.name);
    component->set_dtype(tensor.dtype());
    component->mutable_shape()->mutable_dims()->Add(tensor.shape.begin(), tensor.shape.end());
  }
}

using Components = google::protobuf::RepeatedPtrField<wire::ComponentGradient>;

/// Packs each tensor with int8.
inline Tensors Packed(const Tensors& tensors) {
  Tensors packed;
  for (const Tensor& tensor : tensors) {
    auto bytes = std::visit([](const auto& elements) { return PackInt8(elements); }, tensor.elements);
    packed.push_back({tensor.name, {static_cast<std::int64_t>(bytes.size())}, std::move(bytes)});
  }
  return packed;
}

/// Returns the codec of a name; an empty one is that of tensors that travel as they are.
inline wire::Codec CodecOf(const std::string& name) {
  if (!name.empty() && name != "int8") {
    throw std::runtime_error("expected a codec out of int8, got " + name);
  }
  return name.empty() ? wire::CODEC_UNSPECIFIED : wire::CODEC_INT8;
}

/// Adds tensors to those of a request, packed if there is a codec; large ones are uploaded first.
inline void Send(const Caller& caller, const Tensors& tensors, Components& components,
                 wire::Codec codec = wire::CODEC_UNSPECIFIED) {
  const bool is_packed = codec == wire::CODEC_INT8;
  auto values = ToWire(caller.server(), is_packed ? Packed(tensors) : tensors, caller.inline_limit());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    wire::ComponentGradient* component = components.Add();
    component->set_name(tensors[i].name);
    if (is_packed) {
      component->mutable_packed()->set_codec(codec);
      *component->mutable_packed()->mutable_data() = std::move(values[i]);
    } else {
      *component->mutable_dense() = std::move(values[i]);
    }
  }
}

/// Returns the tensors of a reply; large ones are downloaded.
inline Tensors Receive(const Caller& caller, const Components& components) {
  Tensors tensors;
  std::vector<std::string> handles;
  for (const wire::ComponentGradient& component : components) {
    const wire::Tensor& dense = component.dense();
    tensors.push_back(MakeTensor(component.name(), dense.dtype(), {dense.shape().begin(), dense.shape().end()}));
    if (dense.data_case() == wire::Tensor::kHandle) {
      handles.push_back(dense.handle());
    } else {
      dense.content().copy(tensors.back().data(), tensors.back().bytes().size());
    }
  }
  if (!handles.empty()) {  // then all components are stored
    auto stored = TakeTensors(caller.server(), handles);
    for (std::size_t i = 0; i < stored.size(); ++i) {
      tensors[i].elements = std::move(stored[i].elements);
    }
  }
  return tensors;
}

}  // namespace example
