// The types of arithmetic, and conversions to them and back, for all kernels.

struct BFloat16 {
    unsigned short bits;
};

__device__ __forceinline__ float widen(BFloat16 value) {
    return __uint_as_float(static_cast<unsigned int>(value.bits) << 16);
}

__device__ __forceinline__ float widen(float value) { return value; }

__device__ __forceinline__ double widen(double value) { return value; }

// Rounds to nearest, ties to even. A NaN stays NaN, even if its upper bits are all zero.
__device__ __forceinline__ void narrow(float value, BFloat16& narrowed) {
    const unsigned int bits = __float_as_uint(value);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    const unsigned int rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    narrowed.bits = static_cast<unsigned short>((is_nan ? bits | 0x400000u : rounded) >> 16);
}

__device__ __forceinline__ void narrow(float value, float& narrowed) { narrowed = value; }

__device__ __forceinline__ void narrow(double value, double& narrowed) { narrowed = value; }
