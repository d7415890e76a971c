// Runs CUDA kernels on the CPU: enough of CUDA C++ for kernels without warp intrinsics, textures or streams.
//
// Every CUDA thread is a fiber that runs until it meets __syncthreads or ends. Blocks run one after the other. In what
// order the blocks, and the threads between two barriers, run is drawn from a seed: a result that depends on it is one
// that races.
#pragma once

#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)

#ifndef EMULATED_BLOCK_BEGINS
#define EMULATED_BLOCK_BEGINS
#endif

struct Dimensions {
    unsigned int x, y, z;
};

// Words are assigned by functions, for which the sanitizer checks addresses; it does not for copies by the compiler.
struct alignas(8) uint2 {
    unsigned int x, y;

    uint2& operator=(const uint2& other) {
        x = other.x, y = other.y;
        return *this;
    }
};

struct alignas(16) uint4 {
    unsigned int x, y, z, w;

    uint4& operator=(const uint4& other) {
        x = other.x, y = other.y, z = other.z, w = other.w;
        return *this;
    }
};

static Dimensions threadIdx, blockIdx, blockDim, gridDim;

constexpr int MAX_SHARED_BYTES = 232448;
constexpr int GUARD_BYTES = 1024;
uint4 shared_memory[(MAX_SHARED_BYTES + GUARD_BYTES) / sizeof(uint4)];

inline float rsqrtf(float value) { return 1 / sqrtf(value); }
inline double emulated_rsqrt(double value) { return 1 / sqrt(value); }
#define rsqrt emulated_rsqrt

inline float __fdividef(float x, float y) { return x / y; }

inline unsigned int __float_as_uint(float value) {
    unsigned int bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float __uint_as_float(unsigned int bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

inline long long __double_as_longlong(double value) {
    long long bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline double __longlong_as_double(long long bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

template <typename T>
T __ldcs(const T* address) {
    return *address;
}

template <typename T>
T __ldcg(const T* address) {
    return *address;
}

template <typename T>
void __stcs(T* address, T value) {
    *address = value;
}

inline unsigned int atomicAdd(unsigned int* address, unsigned int value) {
    const unsigned int old = *address;
    *address += value;
    return old;
}

inline unsigned long long atomicMin(unsigned long long* address, unsigned long long value) {
    const unsigned long long old = *address;
    *address = value < old ? value : old;
    return old;
}

inline void __threadfence() {}

inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
    return static_cast<unsigned long long>((static_cast<unsigned __int128>(x) * y) >> 64);
}

namespace emulation {

constexpr int MAX_THREADS = 1024;
constexpr int STACK_BYTES = 1 << 16;

enum Status { OK = 0, BARRIER_NOT_MET_BY_ALL = 1, SHARED_MEMORY_OVERRUN = 2, TOO_LARGE = 3 };

struct Fiber {
    ucontext_t context;
    jmp_buf resume;
    bool is_started = false;
    bool is_done = false;
};

static Fiber fibers[MAX_THREADS];
static char* stacks = nullptr;
static jmp_buf scheduler;
static int running;
static void (*kernel)(const void*);
static const void* kernel_arguments;

// Lets the others run; returns when it is this fiber's turn again.
inline void pause() {
    if (_setjmp(fibers[running].resume) == 0) {
        _longjmp(scheduler, 1);
    }
}

// A fiber outlives its block: the next block's thread of the same index goes on in it.
inline void fiber_main() {
    while (true) {
        kernel(kernel_arguments);
        fibers[running].is_done = true;
        pause();
    }
}

inline void run_until_pause(int thread) {
    Fiber& fiber = fibers[thread];
    running = thread;
    threadIdx = {static_cast<unsigned int>(thread), 0, 0};
    if (_setjmp(scheduler) != 0) {
        return;
    }
    if (fiber.is_started) {
        _longjmp(fiber.resume, 1);
    }
    fiber.is_started = true;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks + static_cast<size_t>(thread) * STACK_BYTES;
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_main, 0);
    setcontext(&fiber.context);
}

// A permutation of 0 ... count - 1; the identity for seed 0.
inline void shuffle(int* order, int count, uint64_t& seed) {
    for (int i = 0; i < count; ++i) {
        order[i] = i;
    }
    for (int i = count - 1; i > 0 && seed != 0; --i) {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        const int other = static_cast<int>(seed % (i + 1));
        const int swapped = order[i];
        order[i] = order[other];
        order[other] = swapped;
    }
}

inline Status run_block(int threads, int shared_bytes, uint64_t& seed) {
    EMULATED_BLOCK_BEGINS
    memset(shared_memory, 0xff, sizeof shared_memory);
    for (int thread = 0; thread < threads; ++thread) {
        fibers[thread].is_done = false;
    }
    static int order[MAX_THREADS];
    int num_done = 0;
    while (num_done == 0) {
        shuffle(order, threads, seed);
        for (int i = 0; i < threads; ++i) {
            run_until_pause(order[i]);
            num_done += fibers[order[i]].is_done;
        }
    }
    if (num_done != threads) {
        abort();  // the fibers left at the barrier could not be used again
    }
    const unsigned char* bytes = reinterpret_cast<const unsigned char*>(shared_memory);
    for (int i = shared_bytes; i < shared_bytes + GUARD_BYTES; ++i) {
        if (bytes[i] != 0xff) {
            return SHARED_MEMORY_OVERRUN;
        }
    }
    return OK;
}

inline Status run(
    void (*function)(const void*), const void* arguments, int grid_x, int grid_y, int threads, int shared_bytes,
    uint64_t seed) {
    if (threads > MAX_THREADS || shared_bytes > MAX_SHARED_BYTES) {
        return TOO_LARGE;
    }
    if (stacks == nullptr) {
        stacks = static_cast<char*>(malloc(static_cast<size_t>(MAX_THREADS) * STACK_BYTES));
    }
    kernel = function;
    kernel_arguments = arguments;
    gridDim = {static_cast<unsigned int>(grid_x), static_cast<unsigned int>(grid_y), 1};
    blockDim = {static_cast<unsigned int>(threads), 1, 1};
    int* blocks = static_cast<int*>(malloc(sizeof(int) * grid_x * grid_y));
    shuffle(blocks, grid_x * grid_y, seed);
    Status status = OK;
    for (int i = 0; i < grid_x * grid_y && status == OK; ++i) {
        blockIdx = {static_cast<unsigned int>(blocks[i] % grid_x), static_cast<unsigned int>(blocks[i] / grid_x), 0};
        status = run_block(threads, shared_bytes, seed);
    }
    free(blocks);
    return status;
}

template <auto KERNEL>
struct ByPointer;

template <typename Arguments, void (*KERNEL)(Arguments)>
struct ByPointer<KERNEL> {
    static void call(const void* arguments) { KERNEL(*static_cast<const Arguments*>(arguments)); }
};

}  // namespace emulation

inline void __syncthreads() { emulation::pause(); }

// What the host calls to launch a kernel.
#define EMULATED_KERNEL(kernel)                                                                        \
    extern "C" int emulated_##kernel(                                                                  \
        const void* arguments, int grid_x, int grid_y, int threads, int shared_bytes, uint64_t seed) { \
        return emulation::run(                                                                         \
            emulation::ByPointer<kernel>::call, arguments, grid_x, grid_y, threads, shared_bytes, seed); \
    }
