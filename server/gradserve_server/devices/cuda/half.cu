// The only PTX: conversions of float16, which CUDA C++ does not have without the toolkit's headers.

struct Half {
    unsigned short bits;
};

__device__ __forceinline__ float widen(Half value) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
}

__device__ __forceinline__ void narrow(float value, Half& narrowed) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrowed.bits) : "f"(value));
}
