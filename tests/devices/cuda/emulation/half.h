// What half.cu has, without PTX.
#pragma once

#include "cuda_emulation.h"

struct Half {
    unsigned short bits;
};

inline float widen(Half value) {
    const unsigned int sign = (value.bits & 0x8000u) << 16;
    const unsigned int magnitude = value.bits & 0x7fffu;
    if (magnitude >= 0x7c00u) {
        return __uint_as_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    }
    // Read as a float32, the bits have an exponent that is too small by 127 - 15; a multiplication also mends subnormals.
    const float scaled = __uint_as_float(magnitude << 13) * 0x1p112f;
    return __uint_as_float(sign | __float_as_uint(scaled));
}

// To the nearest, ties to even.
inline void narrow(float value, Half& narrowed) {
    const unsigned int sign = (__float_as_uint(value) >> 16) & 0x8000u;
    const float magnitude = fabsf(value);
    unsigned int bits;
    if (magnitude != magnitude) {
        bits = 0x7fffu;
    } else if (magnitude >= 65520.0f) {
        bits = 0x7c00u;
    } else if (magnitude < 0x1p-14f) {
        bits = __float_as_uint(magnitude + 0.5f) - __float_as_uint(0.5f);  // the sum rounds at 2^-24, a subnormal's step
    } else {
        const unsigned int wide = __float_as_uint(magnitude);
        bits = (wide - (112u << 23) + 0xfffu + ((wide >> 13) & 1u)) >> 13;
    }
    narrowed.bits = static_cast<unsigned short>(sign | bits);
}
