// LayerNorm and its gradient; the formulas are in reference.py. x is a matrix with a row for each group. The members of
// each struct are listed in `ARGUMENTS` of kernels.py, in the same order.
//
// A few elements are added up in U, and these sums in double, so the error does not grow with the number of elements. The
// order is fixed, so the result is the same every time.

extern __shared__ uint4 shared_memory[];

// The number of elements that a thread adds up in U. Their loads do not wait for each other.
constexpr int BATCH = 8;

// The part of a group that a thread works on. A block has `threads_of_group` threads, a power of two, for each of its
// groups. `is_active` is false beyond the last group: such threads do nothing, but reach every barrier.
struct Place {
    int threads_of_group;
    int lane;
    long long group;
    bool is_active;

    __device__ __forceinline__ Place(long long first_group, long long groups, long long threads_of_group)
        : threads_of_group(static_cast<int>(threads_of_group)),
          lane(threadIdx.x & (this->threads_of_group - 1)),
          group(first_group + threadIdx.x / this->threads_of_group),
          is_active(group < groups) {}

    // Gives every thread the sums over the threads of its group.
    template <int COUNT>
    __device__ __forceinline__ void add_up(double (&sums)[COUNT]) const {
        double* shared = reinterpret_cast<double*>(shared_memory);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            shared[i * blockDim.x + threadIdx.x] = sums[i];
        }
        __syncthreads();
        for (int half = threads_of_group / 2; half > 0; half /= 2) {
            if (lane < half) {
#pragma unroll
                for (int i = 0; i < COUNT; ++i) {
                    shared[i * blockDim.x + threadIdx.x] += shared[i * blockDim.x + threadIdx.x + half];
                }
            }
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            sums[i] = shared[i * blockDim.x + threadIdx.x - lane];
        }
        __syncthreads();
    }
};

// The first group of a block, and the step to the block's next groups. The division has 32 bits, because a 64-bit one
// calls a function, which makes registers spill.
struct GroupWalk {
    long long first;
    long long step;

    __device__ __forceinline__ explicit GroupWalk(long long threads_of_group) {
        const unsigned int groups = blockDim.x / static_cast<unsigned int>(threads_of_group);
        first = static_cast<long long>(blockIdx.x) * groups;
        step = static_cast<long long>(gridDim.x) * groups;
    }
};

// Calls `of_vector` with the index of each of the thread's vectors in a group, and `of_batch` after each batch of vectors.
template <int WIDTH, typename OfVector, typename OfBatch>
__device__ __forceinline__ void for_vectors(const Place& place, long long size, OfVector of_vector, OfBatch of_batch) {
    constexpr int VECTORS = BATCH / WIDTH;
    const long long step = place.threads_of_group * WIDTH;
    for (long long first = place.lane * WIDTH; first < size; first += VECTORS * step) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            if (first + i * step < size) {
                of_vector(first + i * step);
            }
        }
        of_batch();
    }
}

// Loads elements of scale or offset; a vector of them may be longer than one instruction can load.
template <int WIDTH, typename U>
__device__ __forceinline__ void load_params(const U* address, U (&params)[WIDTH]) {
    constexpr int FULL_WIDTH = 16 / sizeof(U);
    constexpr int PART = WIDTH < FULL_WIDTH ? WIDTH : FULL_WIDTH;
#pragma unroll
    for (int first = 0; first < WIDTH; first += PART) {
        Vector<U, PART> part;
        part.load(address + first);
#pragma unroll
        for (int i = 0; i < PART; ++i) {
            params[first + i] = part.elements[i];
        }
    }
}

template <typename T, typename U>
struct ForwardArguments {
    const T* x;
    const U* scale;
    const U* offset;
    T* y;
    U* mean;
    U* rstd;
    long long groups;
    long long size;
    long long threads_of_group;
    double epsilon;
};

// A power of two, at most 1 / magnitude and at least half of it, as far as it is in the normal range of float; 1 for an
// infinite magnitude. The sum of the threads' magnitudes may be beyond the range of float, its 2048th part is not.
__device__ __forceinline__ float reducing(double magnitude) {
    const int exponent = static_cast<int>(__float_as_uint(static_cast<float>(magnitude / 2048)) >> 23);
    const int opposite = 253 - 11 - exponent;
    return exponent == 255 ? 1.0f : __uint_as_float((opposite < 1 ? 1u : static_cast<unsigned int>(opposite)) << 23);
}

// Computes y, mean and rstd. Differences are added up: from the first element for the mean, from the mean for the
// variance, as multiples by a power of two whose squares neither overflow nor vanish.
template <int WIDTH, typename T, typename U>
__device__ __forceinline__ void forward(const ForwardArguments<T, U>& arguments) {
    const long long size = arguments.size;
    for (GroupWalk walk(arguments.threads_of_group); walk.first < arguments.groups; walk.first += walk.step) {
        const Place place(walk.first, arguments.groups, arguments.threads_of_group);
        const long long elements = place.is_active ? size : 0;
        const T* x = arguments.x + place.group * size;
        const U first = elements > 0 ? widen(x[0]) : U(0);
        const U shift = first - first == 0 ? first : U(0);  // a difference from an infinity would not be a number
        double total[2] = {0, 0};  // of the differences, and of the threads' largest ones
        U part = 0;
        float largest = 0;
        for_vectors<WIDTH>(
            place, elements,
            [&](long long index) {
                Vector<T, WIDTH> vector;
                vector.load(x + index);
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) {
                    const U difference = widen(vector.elements[i]) - shift;
                    part += difference;
                    largest = fmaxf(largest, fabsf(static_cast<float>(difference)));
                }
            },
            [&] {
                total[0] += part;
                part = 0;
            });
        total[1] = largest;
        place.add_up(total);
        // No deviation is more than twice as large as the largest difference.
        const float factor = reducing(2 * total[1]);
        const double exact_mean = size > 0 ? shift + total[0] / size : 0;
        const U mean = static_cast<U>(exact_mean);
        // The rounding error of the mean matters if the deviations are small compared to it.
        const U rest = static_cast<U>(exact_mean - mean);
        double squares[1] = {0};
        for_vectors<WIDTH>(
            place, elements,
            [&](long long index) {
                Vector<T, WIDTH> vector;
                vector.load(x + index);
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) {
                    const U deviation = (widen(vector.elements[i]) - mean - rest) * factor;
                    part += deviation * deviation;
                }
            },
            [&] {
                squares[0] += part;
                part = 0;
            });
        place.add_up(squares);
        const double variance = squares[0] / (size * (static_cast<double>(factor) * factor));
        const U rstd = static_cast<U>(1 / sqrt(variance + arguments.epsilon));
        if (place.is_active && place.lane == 0) {
            arguments.mean[place.group] = mean;
            arguments.rstd[place.group] = rstd;
        }
        T* y = arguments.y + place.group * size;
        for_vectors<WIDTH>(
            place, elements,
            [&](long long index) {
                Vector<T, WIDTH> vector;
                vector.load_last(x + index);
                U scale[WIDTH];
                U offset[WIDTH];
                load_params(arguments.scale + index, scale);
                load_params(arguments.offset + index, offset);
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) {
                    const U normalized = (widen(vector.elements[i]) - mean - rest) * rstd;
                    narrow(normalized * scale[i] + offset[i], vector.elements[i]);
                }
                vector.store(y + index);
            },
            [] {});
    }
}

template <typename T, typename U>
struct XGradientArguments {
    const T* y_backprop;
    const T* x;
    const U* scale;
    const U* mean;
    const U* rstd;
    T* x_backprop;
    long long groups;
    long long size;
    long long threads_of_group;
};

// Computes x_backprop.
template <int WIDTH, typename T, typename U>
__device__ __forceinline__ void x_gradient(const XGradientArguments<T, U>& arguments) {
    const long long size = arguments.size;
    for (GroupWalk walk(arguments.threads_of_group); walk.first < arguments.groups; walk.first += walk.step) {
        const Place place(walk.first, arguments.groups, arguments.threads_of_group);
        const long long elements = place.is_active ? size : 0;
        const T* x = arguments.x + place.group * size;
        const T* dy = arguments.y_backprop + place.group * size;
        const U mean = place.is_active ? arguments.mean[place.group] : U(0);
        const U rstd = place.is_active ? arguments.rstd[place.group] : U(0);
        double sums[2] = {0, 0};  // of g = dy scale, and of g n with n = (x - mean) rstd, so g n has about the range of g
        U part = 0;
        U part_dot = 0;
        for_vectors<WIDTH>(
            place, elements,
            [&](long long index) {
                Vector<T, WIDTH> dy_vector;
                Vector<T, WIDTH> x_vector;
                dy_vector.load(dy + index);
                x_vector.load(x + index);
                U scale[WIDTH];
                load_params(arguments.scale + index, scale);
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) {
                    const U g = widen(dy_vector.elements[i]) * scale[i];
                    part += g;
                    part_dot += g * ((widen(x_vector.elements[i]) - mean) * rstd);
                }
            },
            [&] {
                sums[0] += part;
                sums[1] += part_dot;
                part = 0;
                part_dot = 0;
            });
        place.add_up(sums);
        const U mean_of_g = static_cast<U>(sums[0] / size);
        const U mean_of_g_n = static_cast<U>(sums[1] / size);
        T* dx = arguments.x_backprop + place.group * size;
        for_vectors<WIDTH>(
            place, elements,
            [&](long long index) {
                Vector<T, WIDTH> dy_vector;
                Vector<T, WIDTH> x_vector;
                dy_vector.load(dy + index);
                x_vector.load(x + index);
                U scale[WIDTH];
                load_params(arguments.scale + index, scale);
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) {
                    const U g = widen(dy_vector.elements[i]) * scale[i];
                    const U n = (widen(x_vector.elements[i]) - mean) * rstd;
                    narrow((g - mean_of_g - n * mean_of_g_n) * rstd, dy_vector.elements[i]);
                }
                dy_vector.store(dx + index);
            },
            [] {});
    }
}

template <typename T, typename U>
struct ParamSumsArguments {
    const T* y_backprop;
    const T* x;
    const U* mean;
    const U* rstd;
    double* partial_sums;  // [splits, 2, size]: of dy (x - mean) rstd, and of dy
    long long groups;
    long long size;
};

// Computes sums over groups. A block has COLUMNS columns; the gridDim.y blocks of the same columns, their splits, share the
// groups.
template <int COLUMNS, typename T, typename U>
__device__ __forceinline__ void param_sums(const ParamSumsArguments<T, U>& arguments) {
    const long long size = arguments.size;
    const int column_of_block = threadIdx.x % COLUMNS;
    const long long column = static_cast<long long>(blockIdx.x) * COLUMNS + column_of_block;
    const long long rows = blockDim.x / COLUMNS;
    const long long step = rows * gridDim.y;
    double dot = 0;
    double total = 0;
    if (column < size) {
        for (long long first = blockIdx.y * rows + threadIdx.x / COLUMNS; first < arguments.groups;
             first += BATCH * step) {
            U part_dot = 0;
            U part_total = 0;
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const long long group = first + i * step;
                if (group < arguments.groups) {
                    const U dy = widen(arguments.y_backprop[group * size + column]);
                    const U difference = widen(arguments.x[group * size + column]) - arguments.mean[group];
                    part_dot += dy * (difference * arguments.rstd[group]);
                    part_total += dy;
                }
            }
            dot += part_dot;
            total += part_total;
        }
    }
    double* dots = reinterpret_cast<double*>(shared_memory);
    double* totals = dots + blockDim.x;
    dots[threadIdx.x] = dot;
    totals[threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.x < COLUMNS && column < size) {
        for (int other = threadIdx.x + COLUMNS; other < blockDim.x; other += COLUMNS) {
            dot += dots[other];
            total += totals[other];
        }
        double* partial_sums = arguments.partial_sums + 2 * blockIdx.y * size + column;
        partial_sums[0] = dot;
        partial_sums[size] = total;
    }
}

template <typename U>
struct ParamGradientArguments {
    const double* partial_sums;
    U* scale_backprop;
    U* offset_backprop;
    long long splits;
    long long size;
};

// Computes scale_backprop and offset_backprop from the sums of the splits, in their order.
template <typename U>
__device__ __forceinline__ void param_gradient(const ParamGradientArguments<U>& arguments) {
    const long long size = arguments.size;
    for (GridStride walk; walk.index < size; walk.index += walk.step) {
        double dot = 0;
        double total = 0;
        for (long long split = 0; split < arguments.splits; ++split) {
            dot += arguments.partial_sums[2 * split * size + walk.index];
            total += arguments.partial_sums[(2 * split + 1) * size + walk.index];
        }
        arguments.scale_backprop[walk.index] = static_cast<U>(dot);
        arguments.offset_backprop[walk.index] = static_cast<U>(total);
    }
}
