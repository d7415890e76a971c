// Tensors on the wire: inside of messages if they are small, otherwise in streams of chunks.

#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "server.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the bytes of tensors are little-endian on the wire: turn them around on this processor"
#endif

namespace example {

inline constexpr std::size_t kChunkBytes = 1 << 20;

using Shape = std::vector<std::int64_t>;

/// A named tensor with its elements in row-major order. Packed ones are bytes.
struct Tensor {
  std::string name;
  Shape shape;
  std::variant<std::vector<float>, std::vector<double>, std::vector<std::uint8_t>> elements;

  wire::DataType dtype() const {
    constexpr wire::DataType kTypes[] = {wire::DATA_TYPE_FLOAT32, wire::DATA_TYPE_FLOAT64, wire::DATA_TYPE_UINT8};
    return kTypes[elements.index()];
  }
  std::string_view bytes() const {
    return std::visit(
        [](const auto& values) {
          return std::string_view(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(values[0]));
        },
        elements);
  }
  char* data() {
    return std::visit([](auto& values) { return reinterpret_cast<char*>(values.data()); }, elements);
  }
  std::vector<float>& floats() { return std::get<std::vector<float>>(elements); }
  const std::vector<float>& floats() const { return std::get<std::vector<float>>(elements); }
};

using Tensors = std::vector<Tensor>;

inline const Tensor& Find(const Tensors& tensors, const std::string& name) {
  const auto found = std::find_if(tensors.begin(), tensors.end(), [&](const Tensor& each) { return each.name == name; });
  if (found == tensors.end()) {
    throw std::runtime_error("there is no tensor '" + name + "'");
  }
  return *found;
}

/// Returns the tensors that have the names of `wanted`, in that order. Averages come in the order of the client that has
/// made the accumulator.
inline Tensors Select(const Tensors& tensors, const Tensors& wanted) {
  Tensors selected;
  for (const Tensor& each : wanted) {
    selected.push_back(Find(tensors, each.name));
  }
  return selected;
}

/// Makes a tensor of zeros.
inline Tensor MakeTensor(std::string name, wire::DataType dtype, Shape shape) {
  const auto size = std::accumulate(shape.begin(), shape.end(), std::size_t{1}, std::multiplies<>());
  switch (dtype) {
    case wire::DATA_TYPE_FLOAT32:
      return {std::move(name), std::move(shape), std::vector<float>(size)};
    case wire::DATA_TYPE_FLOAT64:
      return {std::move(name), std::move(shape), std::vector<double>(size)};
    default:
      throw std::runtime_error("expected float32 or float64 from the server, got " + wire::DataType_Name(dtype));
  }
}

/// Fills tensors, one after the other, with bytes that come in pieces of any size.
class Filling {
 public:
  explicit Filling(Tensors& tensors) : tensors_(tensors) {}

  void Add(std::string_view piece) {
    while (!piece.empty()) {
      if (index_ == tensors_.size()) {
        throw std::runtime_error("the server sent more bytes than it announced");
      }
      Tensor& tensor = tensors_[index_];
      const std::size_t count = std::min(piece.size(), tensor.bytes().size() - filled_);
      piece.copy(tensor.data() + filled_, count);
      piece.remove_prefix(count);
      filled_ += count;
      if (filled_ == tensor.bytes().size()) {
        ++index_;
        filled_ = 0;
      }
    }
  }

 private:
  Tensors& tensors_;
  std::size_t index_ = 0;
  std::size_t filled_ = 0;
};

/// Stores tensors on the server for the next call; returns one handle for each.
inline std::vector<wire::Tensor> PutTensors(const Server& server, const Tensors& tensors, Seconds limit = kCallLimit) {
  wire::PutTensorsResponse reply;
  server.WithRetries(limit, [&](grpc::ClientContext& context) {
    const auto stream = server.tensors->PutTensors(&context, &reply);
    wire::PutTensorsRequest message;
    message.mutable_header()->set_for_next_call(true);
    for (const Tensor& tensor : tensors) {
      wire::TensorSpec* spec = message.mutable_header()->add_tensors();
      spec->set_dtype(tensor.dtype());
      spec->mutable_shape()->Add(tensor.shape.begin(), tensor.shape.end());
    }
    // Write waits until the connection takes more. It returns false if the server has refused the upload.
    bool is_open = stream->Write(message);
    for (const Tensor& tensor : tensors) {
      std::string_view rest = tensor.bytes();
      while (is_open && !rest.empty()) {
        const std::string_view chunk = rest.substr(0, kChunkBytes);
        message.set_chunk(chunk.data(), chunk.size());
        is_open = stream->Write(message);
        rest.remove_prefix(chunk.size());
      }
    }
    stream->WritesDone();
    return stream->Finish();
  });
  std::vector<wire::Tensor> handles(reply.tensors_size());
  for (int i = 0; i < reply.tensors_size(); ++i) {
    handles[i].set_handle(reply.tensors(i).handle());
  }
  return handles;
}

/// Reads stored tensors, chunk by chunk, and deletes them on the server once they are sent.
inline Tensors TakeTensors(const Server& server, const std::vector<std::string>& handles, Seconds limit = kCallLimit) {
  wire::GetTensorsRequest request;
  request.mutable_handles()->Add(handles.begin(), handles.end());
  request.set_release(true);
  Tensors tensors;
  server.WithRetries(limit, [&](grpc::ClientContext& context) {
    tensors.clear();
    Filling filling(tensors);
    const auto stream = server.tensors->GetTensors(&context, request);
    wire::GetTensorsResponse message;
    while (stream->Read(&message)) {
      for (const wire::TensorSpec& spec : message.header().tensors()) {
        tensors.push_back(MakeTensor("", spec.dtype(), {spec.shape().begin(), spec.shape().end()}));
      }
      filling.Add(message.chunk());
    }
    return stream->Finish();
  });
  return tensors;
}

/// Converts tensors to those of a request; the handles of large ones are uploaded first.
inline std::vector<wire::Tensor> ToWire(const Server& server, const Tensors& tensors, std::int64_t inline_limit) {
  std::size_t num_bytes = 0;
  std::vector<wire::Tensor> contents;
  for (const Tensor& tensor : tensors) {
    num_bytes += tensor.bytes().size();
  }
  if (num_bytes > static_cast<std::size_t>(inline_limit)) {
    return PutTensors(server, tensors);
  }
  for (const Tensor& tensor : tensors) {
    wire::Tensor& content = contents.emplace_back();
    content.set_dtype(tensor.dtype());
    content.mutable_shape()->Add(tensor.shape.begin(), tensor.shape.end());
    content.set_content(tensor.bytes().data(), tensor.bytes().size());
  }
  return contents;
}

}  // namespace example
