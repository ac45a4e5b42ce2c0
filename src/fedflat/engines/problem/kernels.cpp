// Layers of a network on images with examples innermost: [channels, height, width, EXAMPLES]; features are [features,
// EXAMPLES]. Libraries vectorise over channels, and a network like LeNet-5 has too few of them to fill a vector. Here
// vectors run along the columns and examples of a row, of which there are always enough, and sums stay in registers.
// EXAMPLES, the batch size, is defined before this text, and the network's two functions after it.

#if defined(__AVX512F__)
constexpr long MAX_LANES = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr long MAX_LANES = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr long MAX_LANES = 4, REGISTERS = 32;
#else
constexpr long MAX_LANES = 4, REGISTERS = 16;
#endif
#define UNROLLED _Pragma("GCC unroll 32") for

namespace {  // internal linkage, because the names of these symbols do not contain the batch size

constexpr long minimum(long a, long b) { return a < b ? a : b; }
constexpr long maximum(long a, long b) { return a < b ? b : a; }
constexpr long ceil_div(long a, long b) { return (a + b - 1) / b; }

template <typename T>
inline void swap(T& a, T& b) {
  const T c = a;
  a = b;
  b = c;
}

// The largest divisor of a number that does not exceed a limit.
constexpr long largest_divisor(long number, long limit) {
  long largest = 1;
  for (long divisor = 1; divisor <= limit; ++divisor) largest = number % divisor ? largest : divisor;
  return largest;
}

// Lanes of the vectors along an axis: the largest of MAX_LANES, MAX_LANES / 2, ... that fits it.
constexpr long lanes_along(long axis, long lanes = MAX_LANES) { return lanes > axis ? lanes_along(axis, lanes / 2) : lanes; }

template <long LANES>
struct VectorOf {
  typedef float type __attribute__((vector_size(LANES * sizeof(float))));
};

// Vectors are read from and written to any address.
template <typename Vector>
inline Vector load(const float* at) {
  Vector value;
  __builtin_memcpy(&value, at, sizeof value);
  return value;
}
template <typename Vector>
inline void store(float* at, Vector value) {
  __builtin_memcpy(at, &value, sizeof value);
}
template <typename Vector>
inline float total(Vector lanes) {
  float sum = 0;
  for (unsigned lane = 0; lane < sizeof lanes / sizeof sum; ++lane) sum += lanes[lane];
  return sum;
}

// out[column, row] = in[row, column]
template <long ROWS, long COLUMNS>
void transpose(const float* in, float* out) {
  constexpr long BLOCK = 16;
  for (long from = 0; from < COLUMNS; from += BLOCK)
    for (long row = 0; row < ROWS; ++row)
      for (long column = from; column < minimum(from + BLOCK, COLUMNS); ++column)
        out[column * ROWS + row] = in[row * COLUMNS + column];
}

// Copies rows of COLUMNS * EXAMPLES numbers, with PADDING columns of zeros on both sides.
template <long ROWS, long COLUMNS, long PADDING>
void pad_columns(const float* in, float* out) {
  constexpr long SIZE = COLUMNS * EXAMPLES, BORDER = PADDING * EXAMPLES;
  for (long row = 0; row < ROWS; ++row, in += SIZE, out += SIZE + 2 * BORDER) {
    __builtin_memset(out, 0, BORDER * sizeof(float));
    __builtin_memcpy(out + BORDER, in, SIZE * sizeof(float));
    __builtin_memset(out + BORDER + SIZE, 0, BORDER * sizeof(float));
  }
}

// Matrix product: out[r, c] = bias[r] + sum over k of left[r * ROW_STRIDE + k * INNER_STRIDE] * right[k, c]
template <long ROWS, long INNER, long COLUMNS, long ROW_STRIDE, long INNER_STRIDE>
void multiply(const float* left, const float* right, const float* bias, float* out) {
  constexpr long LANES = lanes_along(COLUMNS);
  using Vector = typename VectorOf<LANES>::type;
  // Three quarters of the registers hold sums. If there are few columns, one pass computes all of them.
  constexpr long WIDTH = ceil_div(COLUMNS, LANES), ACROSS = WIDTH < 6 ? WIDTH : 3, STEP = ACROSS * LANES;
  constexpr long DOWN = largest_divisor(ROWS, REGISTERS * 3 / 4 / ACROSS);
  for (long from = 0; from < COLUMNS; from += STEP)
    for (long r = 0; r < ROWS; r += DOWN) {
      long at[ACROSS];  // the end of a row may be computed twice
      UNROLLED(long v = 0; v < ACROSS; ++v) at[v] = minimum(from + v * LANES, COLUMNS - LANES);
      Vector sums[DOWN][ACROSS];
      UNROLLED(long d = 0; d < DOWN; ++d)
        UNROLLED(long v = 0; v < ACROSS; ++v) sums[d][v] = (bias ? bias[r + d] : 0) - Vector{};
      for (long k = 0; k < INNER; ++k) {
        Vector read[ACROSS];
        UNROLLED(long v = 0; v < ACROSS; ++v) read[v] = load<Vector>(right + k * COLUMNS + at[v]);
        const float* factor = left + r * ROW_STRIDE + k * INNER_STRIDE;
        UNROLLED(long d = 0; d < DOWN; ++d)
          UNROLLED(long v = 0; v < ACROSS; ++v) sums[d][v] += read[v] * factor[d * ROW_STRIDE];
      }
      UNROLLED(long d = 0; d < DOWN; ++d)
        UNROLLED(long v = 0; v < ACROSS; ++v) store(out + (r + d) * COLUMNS + at[v], sums[d][v]);
    }
}

template <long ROWS>
void sum_over_examples(const float* in, float* out) {
  for (long row = 0; row < ROWS; ++row) {
    float sum = 0;
    for (long e = 0; e < EXAMPLES; ++e) sum += in[row * EXAMPLES + e];
    out[row] = sum;
  }
}

// A convolution of stride 1 that pads rows itself, and expects an image with padded columns.
template <long IN, long HEIGHT, long WIDTH, long OUT, long KERNEL_HEIGHT, long KERNEL_WIDTH, long PADDING_ROWS>
struct Convolution {
  static constexpr long ROW = WIDTH * EXAMPLES, PLANE = HEIGHT * ROW;
  static constexpr long OUT_HEIGHT = HEIGHT + 2 * PADDING_ROWS - KERNEL_HEIGHT + 1;
  static constexpr long OUT_ROW = (WIDTH - KERNEL_WIDTH + 1) * EXAMPLES, OUT_PLANE = OUT_HEIGHT * OUT_ROW;
  static constexpr long TAPS = KERNEL_HEIGHT * KERNEL_WIDTH, LANES = lanes_along(OUT_ROW);
  using Vector = typename VectorOf<LANES>::type;

  // The kernel rows that overlap the image at output line y.
  static inline long first_row(long y) { return maximum(PADDING_ROWS - y, 0); }
  static inline long last_row(long y) { return minimum(KERNEL_HEIGHT, HEIGHT + PADDING_ROWS - y); }

  // out[o, y, x, e] = bias[o] + sum over ky, kx, i of weight[o, ky, kx, i] * image[i, y + ky - PADDING_ROWS, x + kx, e]
  // TRANSPOSED reads weight[i, KERNEL_HEIGHT - 1 - ky, KERNEL_WIDTH - 1 - kx, o] instead, which computes the gradient of
  // another convolution's image.
  template <bool TRANSPOSED>
  static void convolve(const float* image, const float* weight, const float* bias, float* out) {
    // Three quarters of the registers hold sums: CHANNELS channels of ACROSS vectors each, STEP numbers per channel.
    constexpr long CHANNELS = largest_divisor(OUT, REGISTERS / 4);
    constexpr long ACROSS = minimum(REGISTERS * 3 / 4 / CHANNELS, OUT_ROW / LANES), STEP = ACROSS * LANES;
    constexpr long OUT_STRIDE = TRANSPOSED ? 1 : TAPS * IN, IN_STRIDE = TRANSPOSED ? TAPS * OUT : 1;
    for (long y = 0; y < OUT_HEIGHT; ++y)
      for (long o = 0; o < OUT; o += CHANNELS)
        for (long from = 0; from < OUT_ROW; from += STEP) {
          const long j = minimum(from, OUT_ROW - STEP);  // the end of a row may be computed twice
          Vector sums[CHANNELS][ACROSS];
          UNROLLED(long c = 0; c < CHANNELS; ++c)
            UNROLLED(long v = 0; v < ACROSS; ++v) sums[c][v] = (bias ? bias[o + c] : 0) - Vector{};
          for (long ky = first_row(y); ky < last_row(y); ++ky)
            for (long kx = 0; kx < KERNEL_WIDTH; ++kx)
              for (long i = 0; i < IN; ++i) {
                const float* at = image + i * PLANE + (y + ky - PADDING_ROWS) * ROW + kx * EXAMPLES + j;
                const long tap = ky * KERNEL_WIDTH + kx, position = TRANSPOSED ? (TAPS - 1 - tap) * OUT : tap * IN;
                const float* factor = weight + o * OUT_STRIDE + i * IN_STRIDE + position;
                Vector read[ACROSS];
                UNROLLED(long v = 0; v < ACROSS; ++v) read[v] = load<Vector>(at + v * LANES);
                UNROLLED(long c = 0; c < CHANNELS; ++c)
                  UNROLLED(long v = 0; v < ACROSS; ++v) sums[c][v] += read[v] * factor[c * OUT_STRIDE];
              }
          float* to = out + o * OUT_PLANE + y * OUT_ROW + j;
          UNROLLED(long c = 0; c < CHANNELS; ++c)
            UNROLLED(long v = 0; v < ACROSS; ++v) store(to + c * OUT_PLANE + v * LANES, sums[c][v]);
        }
  }

  // weight[o, ky, kx, i] = sum over y, x, e of gradient[o, y, x, e] * image[i, y + ky - PADDING_ROWS, x + kx, e]
  static void weight_gradient(const float* image, const float* gradient, float* weight) {
    // Registers hold the sums of one kernel row for TOGETHER channels.
    constexpr long TOGETHER = largest_divisor(OUT, maximum((REGISTERS - 2) / KERNEL_WIDTH, 1));
    static thread_local Vector sums[OUT / TOGETHER][KERNEL_HEIGHT][IN][TOGETHER][KERNEL_WIDTH];
    __builtin_memset(sums, 0, sizeof sums);
    Vector fresh;  // 1 in the lanes of a row's last vector that the previous vector does not cover, otherwise 0
    for (long lane = 0; lane < LANES; ++lane) fresh[lane] = lane >= LANES - OUT_ROW % LANES;
    for (long y = 0; y < OUT_HEIGHT; ++y)
      for (long o = 0; o < OUT; o += TOGETHER) {
        const float* down = gradient + o * OUT_PLANE + y * OUT_ROW;
        for (long ky = first_row(y); ky < last_row(y); ++ky)
          for (long i = 0; i < IN; ++i) {
            const float* at = image + i * PLANE + (y + ky - PADDING_ROWS) * ROW;
            auto& row_sums = sums[o / TOGETHER][ky][i];
            Vector partial[TOGETHER][KERNEL_WIDTH];
            UNROLLED(long t = 0; t < TOGETHER; ++t)
              UNROLLED(long kx = 0; kx < KERNEL_WIDTH; ++kx) partial[t][kx] = row_sums[t][kx];
            for (long from = 0; from < OUT_ROW; from += LANES) {
              const long j = minimum(from, OUT_ROW - LANES);
              Vector read[KERNEL_WIDTH];
              UNROLLED(long kx = 0; kx < KERNEL_WIDTH; ++kx) read[kx] = load<Vector>(at + kx * EXAMPLES + j);
              if (j < from) UNROLLED(long kx = 0; kx < KERNEL_WIDTH; ++kx) read[kx] *= fresh;
              UNROLLED(long t = 0; t < TOGETHER; ++t) {
                const Vector slope = load<Vector>(down + t * OUT_PLANE + j);
                UNROLLED(long kx = 0; kx < KERNEL_WIDTH; ++kx) partial[t][kx] += read[kx] * slope;
              }
            }
            UNROLLED(long t = 0; t < TOGETHER; ++t)
              UNROLLED(long kx = 0; kx < KERNEL_WIDTH; ++kx) row_sums[t][kx] = partial[t][kx];
          }
      }
    for (long o = 0; o < OUT; ++o)
      for (long ky = 0; ky < KERNEL_HEIGHT; ++ky)
        for (long kx = 0; kx < KERNEL_WIDTH; ++kx)
          for (long i = 0; i < IN; ++i)
            *weight++ = total(sums[o / TOGETHER][ky][i][o % TOGETHER][kx]);
  }

  // bias[o] = sum over y, x, e of gradient[o, y, x, e]
  static void bias_gradient(const float* gradient, float* bias) {
    for (long o = 0; o < OUT; ++o) {
      Vector sums{};
      float rest = 0;
      const float* plane = gradient + o * OUT_PLANE;
      for (long j = 0; j < OUT_PLANE / LANES * LANES; j += LANES) sums += load<Vector>(plane + j);
      for (long j = OUT_PLANE / LANES * LANES; j < OUT_PLANE; ++j) rest += plane[j];
      bias[o] = total(sums) + rest;
    }
  }
};

// Max-pooling with a stride equal to the window; pixels beyond the last whole window are ignored.
template <long CHANNELS, long HEIGHT, long WIDTH, long WINDOW_HEIGHT, long WINDOW_WIDTH>
struct MaxPool {
  static constexpr long ROW = WIDTH * EXAMPLES, PLANE = HEIGHT * ROW, WINDOW = WINDOW_HEIGHT * WINDOW_WIDTH;
  static constexpr long LANES = lanes_along(EXAMPLES);
  using Vector = typename VectorOf<LANES>::type;

  static constexpr long pixel(long w) { return w / WINDOW_WIDTH * ROW + w % WINDOW_WIDTH * EXAMPLES; }

  // Calls a function for each vector of windows, with the position of the window's first pixel in the image and that of
  // its maximum in the output.
  template <typename Function>
  static inline void for_each_window(Function function) {
    long pooled = 0;
    for (long i = 0; i < CHANNELS; ++i)
      for (long y = 0; y < HEIGHT / WINDOW_HEIGHT; ++y)
        for (long x = 0; x < WIDTH / WINDOW_WIDTH; ++x, pooled += EXAMPLES)
          for (long from = 0; from < EXAMPLES; from += LANES) {
            const long e = minimum(from, EXAMPLES - LANES);
            function(i * PLANE + y * WINDOW_HEIGHT * ROW + x * WINDOW_WIDTH * EXAMPLES + e, pooled + e);
          }
  }

  // The maximum of each window, or NaN if it contains one.
  static void pool(const float* image, float* out) {
    for_each_window([=](long corner, long pooled) {
      Vector largest = load<Vector>(image + corner);
      UNROLLED(long w = 1; w < WINDOW; ++w) {
        const Vector read = load<Vector>(image + corner + pixel(w));
        largest = (read > largest) | (read != read) ? read : largest;
      }
      store(out + pooled, largest);
    });
  }

  // All of a window's gradient goes to its first maximum.
  static void gradient(const float* image, const float* gradient, float* out) {
    if (HEIGHT % WINDOW_HEIGHT || WIDTH % WINDOW_WIDTH) __builtin_memset(out, 0, CHANNELS * PLANE * sizeof(float));
    for_each_window([=](long corner, long pooled) {
      Vector read[WINDOW], rest = load<Vector>(gradient + pooled);
      UNROLLED(long w = 0; w < WINDOW; ++w) read[w] = load<Vector>(image + corner + pixel(w));
      Vector largest = read[0];
      UNROLLED(long w = 1; w < WINDOW; ++w) largest = read[w] > largest ? read[w] : largest;
      UNROLLED(long w = 0; w < WINDOW; ++w) {
        const auto hit = read[w] == largest;
        store(out + corner + pixel(w), hit ? rest : Vector{});
        rest = hit ? Vector{} : rest;
      }
    });
  }
};

template <long SIZE>
void relu(float* values) {
  for (long j = 0; j < SIZE; ++j) values[j] = values[j] < 0 ? 0 : values[j];  // keeps NaN
}

// The gradient of ReLU, given its output.
template <long SIZE>
void relu_gradient(const float* out, float* gradient) {
  for (long j = 0; j < SIZE; ++j) gradient[j] = out[j] <= 0 ? 0 : gradient[j];  // as torch does for NaN
}

}  // namespace
