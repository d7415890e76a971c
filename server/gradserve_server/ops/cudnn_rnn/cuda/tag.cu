// Authenticates memory by the values of a polynomial at two secret places, modulo the prime 2^61 - 1. Its coefficients
// are the 32-bit words w_0, w_1, ... of the memory: sum over i of w_i key^(i + 1).

using Number = unsigned long long;  // less than PRIME

constexpr Number PRIME = (1ull << 61) - 1;
constexpr int PLACES = 2;
constexpr int THREADS = 256;

extern __shared__ uint4 shared_memory[];

// Of a value less than 2^62.
__device__ __forceinline__ Number reduced(Number value) {
    const Number folded = (value & PRIME) + (value >> 61);
    return folded >= PRIME ? folded - PRIME : folded;
}

__device__ __forceinline__ Number add(Number x, Number y) { return reduced(x + y); }

__device__ __forceinline__ Number multiply(Number x, Number y) {
    const Number low = x * y;
    const Number high = __umul64hi(x, y);
    return reduced((low & PRIME) + (high << 3 | low >> 61));
}

__device__ __forceinline__ Number power(Number base, long long exponent) {
    Number result = 1;
    for (; exponent > 0; exponent >>= 1) {
        if (exponent & 1) {
            result = multiply(result, base);
        }
        base = multiply(base, base);
    }
    return result;
}

// Returns w_0 + w_1 key + w_2 key^2 + w_3 key^3.
__device__ __forceinline__ Number value_at(uint4 words, Number key) {
    const Number upper = add(multiply(words.w, key), words.z);
    return add(multiply(add(multiply(upper, key), words.y), key), words.x);
}

// Adds up the numbers of all threads; the sums are in the first thread's.
__device__ __forceinline__ void add_up(Number (&numbers)[PLACES]) {
    Number* shared = reinterpret_cast<Number*>(shared_memory);
    for (int place = 0; place < PLACES; ++place) {
        shared[place * THREADS + threadIdx.x] = numbers[place];
    }
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            for (int place = 0; place < PLACES; ++place) {
                Number* sums = shared + place * THREADS + threadIdx.x;
                sums[0] = add(sums[0], sums[half]);
            }
        }
    }
    if (threadIdx.x == 0) {
        for (int place = 0; place < PLACES; ++place) {
            numbers[place] = shared[place * THREADS];
        }
    }
}

struct ReserveSumsArguments {
    const uint4* content;
    Number* partial_sums;
    long long count;
    long long key_0;
    long long key_1;
    long long stride_0;  // key^(4 step), where step is the number of all threads
    long long stride_1;
};

// Each thread takes every step-th vector of the memory, the last one first, and each block writes a sum for each place.
__device__ __forceinline__ void reserve_sums_of(const ReserveSumsArguments& arguments) {
    const Number keys[PLACES] = {static_cast<Number>(arguments.key_0), static_cast<Number>(arguments.key_1)};
    const Number strides[PLACES] = {static_cast<Number>(arguments.stride_0), static_cast<Number>(arguments.stride_1)};
    const GridStride walk;
    Number sums[PLACES] = {0, 0};
    long long index = walk.index + (arguments.count - 1 - walk.index) / walk.step * walk.step;
    if (walk.index >= arguments.count) {
        index = -1;
    }
#pragma unroll 4
    for (; index >= 0; index -= walk.step) {
        const uint4 words = arguments.content[index];
        for (int place = 0; place < PLACES; ++place) {
            sums[place] = add(multiply(sums[place], strides[place]), value_at(words, keys[place]));
        }
    }
    for (int place = 0; place < PLACES; ++place) {
        sums[place] = multiply(sums[place], power(keys[place], 4 * walk.index + 1));
    }
    add_up(sums);
    if (threadIdx.x == 0) {
        for (int place = 0; place < PLACES; ++place) {
            arguments.partial_sums[place * gridDim.x + blockIdx.x] = sums[place];
        }
    }
}

struct ReserveTagArguments {
    const Number* partial_sums;
    Number* tag;
    Number* second_tag;
    long long blocks;
    long long mask_0;
    long long mask_1;
};

// Adds the secret masks to the sums, and writes the tag to two places. There is one block.
__device__ __forceinline__ void reserve_tag_of(const ReserveTagArguments& arguments) {
    Number sums[PLACES] = {0, 0};
    for (long long block = threadIdx.x; block < arguments.blocks; block += THREADS) {
        for (int place = 0; place < PLACES; ++place) {
            sums[place] = add(sums[place], arguments.partial_sums[place * arguments.blocks + block]);
        }
    }
    add_up(sums);
    if (threadIdx.x == 0) {
        const Number masks[PLACES] = {static_cast<Number>(arguments.mask_0), static_cast<Number>(arguments.mask_1)};
        for (int place = 0; place < PLACES; ++place) {
            const Number masked = add(sums[place], masks[place]);
            arguments.tag[place] = masked;
            arguments.second_tag[place] = masked;
        }
    }
}
