// Packed updates, with fewer bytes on the wire. The comments of codecs.proto say what every byte is.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace example {

inline constexpr std::size_t kBlock = 256;

/// Packs values in a byte for each, and a scale for each block of 256. Arithmetic is in float32, and rounds to even.
/// The bytes of the scales are those of this processor, which tensors.h expects to be little-endian.
template <typename Element>
std::vector<std::uint8_t> PackInt8(const std::vector<Element>& elements) {
  std::vector<std::uint8_t> packed;
  packed.reserve(elements.size() + (elements.size() / kBlock + 1) * sizeof(float));
  for (std::size_t start = 0; start < elements.size(); start += kBlock) {
    const std::vector<float> values(elements.begin() + start,
                                    elements.begin() + std::min(start + kBlock, elements.size()));
    float scale = 0;
    for (const float value : values) {
      if (!std::isfinite(value)) {
        throw std::runtime_error("expected finite values, which int8 can represent");
      }
      scale = std::max(scale, std::abs(value));
    }
    std::uint8_t bytes[sizeof(float)];
    std::memcpy(bytes, &scale, sizeof(float));
    packed.insert(packed.end(), bytes, bytes + sizeof(float));
    for (const float value : values) {
      const float number = scale > 0 ? std::nearbyint(value / scale * 127.0F) : 0.0F;
      packed.push_back(static_cast<std::uint8_t>(static_cast<std::int8_t>(number)));
    }
  }
  return packed;
}

}  // namespace example
