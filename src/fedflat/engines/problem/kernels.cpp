// Convolutions of stride 1 and max-pooling over images with examples innermost: [channels, height, width, examples].
//
// A row of such an image is one run of width * examples numbers; neighbouring columns are EXAMPLES numbers apart.
// Vectors run along rows however few channels there are, and sums stay in registers. Shapes are constants defined
// before this text: IN and OUT (channels), HEIGHT, WIDTH and EXAMPLES (of the image), KERNEL_HEIGHT and KERNEL_WIDTH
// (of the kernel or pooling window), and PADDING_ROWS (rows of zero padding above and below the image).

#if defined(__AVX512F__)
constexpr long WIDEST = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr long WIDEST = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr long WIDEST = 4, REGISTERS = 32;
#else
constexpr long WIDEST = 4, REGISTERS = 16;
#endif
constexpr long ROW = WIDTH * EXAMPLES, PLANE = HEIGHT * ROW, OUT_ROW = (WIDTH - KERNEL_WIDTH + 1) * EXAMPLES;

// A vector must not be longer than its axis: a row of a convolution's output, or the examples of a window.
constexpr long fitting(long lanes) { return lanes > (OUT ? OUT_ROW : EXAMPLES) ? fitting(lanes / 2) : lanes; }
constexpr long LANES = fitting(WIDEST);
typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));
#define UNROLLED _Pragma("GCC unroll 32") for

static inline Vector load(const float* at) { return *reinterpret_cast<const Vector*>(at); }
static inline void store(float* at, Vector value) { *reinterpret_cast<Vector*>(at) = value; }
constexpr long minimum(long a, long b) { return a < b ? a : b; }

// The largest divisor of a number that does not exceed a limit.
constexpr long largest_divisor(long number, long limit) {
  long largest = 1;
  for (long divisor = 1; divisor <= limit; ++divisor) largest = number % divisor ? largest : divisor;
  return largest;
}

#if OUT

constexpr long OUT_HEIGHT = HEIGHT + 2 * PADDING_ROWS - KERNEL_HEIGHT + 1;
constexpr long OUT_PLANE = OUT_HEIGHT * OUT_ROW;
constexpr long TAPS = KERNEL_HEIGHT * KERNEL_WIDTH * IN;

// The kernel rows that overlap the image at output line y.
static inline long first_row(long y) { return y < PADDING_ROWS ? PADDING_ROWS - y : 0; }
static inline long last_row(long y) { return minimum(KERNEL_HEIGHT, HEIGHT + PADDING_ROWS - y); }

// Three quarters of the registers hold sums: CHANNELS channels of ACROSS vectors each, STEP numbers per channel.
constexpr long CHANNELS = largest_divisor(OUT, REGISTERS / 4);
constexpr long ACROSS = minimum(REGISTERS * 3 / 4 / CHANNELS, OUT_ROW / LANES), STEP = ACROSS * LANES;

// out[o, y, x, e] = bias[o] + sum over ky, kx, i of weight[o, ky, kx, i] * image[i, y + ky - PADDING_ROWS, x + kx, e]
extern "C" void convolve(const float* image, const float* weight, const float* bias, float* out) {
  for (long y = 0; y < OUT_HEIGHT; ++y)
    for (long o = 0; o < OUT; o += CHANNELS)
      for (long from = 0; from < OUT_ROW; from += STEP) {
        const long j = minimum(from, OUT_ROW - STEP);  // the end of a row may be computed twice
        Vector sums[CHANNELS][ACROSS];
        UNROLLED(long c = 0; c < CHANNELS; ++c)
          UNROLLED(long v = 0; v < ACROSS; ++v) sums[c][v] = bias[o + c] - Vector{};
        for (long ky = first_row(y); ky < last_row(y); ++ky)
          for (long kx = 0; kx < KERNEL_WIDTH; ++kx)
            for (long i = 0; i < IN; ++i) {
              const float* at = image + i * PLANE + (y + ky - PADDING_ROWS) * ROW + kx * EXAMPLES + j;
              const float* factor = weight + o * TAPS + (ky * KERNEL_WIDTH + kx) * IN + i;
              Vector read[ACROSS];
              UNROLLED(long v = 0; v < ACROSS; ++v) read[v] = load(at + v * LANES);
              UNROLLED(long c = 0; c < CHANNELS; ++c)
                UNROLLED(long v = 0; v < ACROSS; ++v) sums[c][v] += read[v] * factor[c * TAPS];
            }
        float* to = out + o * OUT_PLANE + y * OUT_ROW + j;
        UNROLLED(long c = 0; c < CHANNELS; ++c)
          UNROLLED(long v = 0; v < ACROSS; ++v) store(to + c * OUT_PLANE + v * LANES, sums[c][v]);
      }
}

// Registers hold the sums of one kernel row for TOGETHER channels.
constexpr long TOGETHER = largest_divisor(OUT, REGISTERS - 2 > KERNEL_WIDTH ? (REGISTERS - 2) / KERNEL_WIDTH : 1);

static inline float total(Vector lanes) {
  float sum = 0;
  for (long lane = 0; lane < LANES; ++lane) sum += lanes[lane];
  return sum;
}

// weight[o, ky, kx, i] = sum over y, x, e of gradient[o, y, x, e] * image[i, y + ky - PADDING_ROWS, x + kx, e]
// bias[o] = sum of gradient[o]
extern "C" void convolution_gradients(const float* image, const float* gradient, float* weight, float* bias) {
  static thread_local Vector sums[OUT / TOGETHER][KERNEL_HEIGHT][IN][TOGETHER][KERNEL_WIDTH], totals[OUT];
  __builtin_memset(sums, 0, sizeof sums);
  __builtin_memset(totals, 0, sizeof totals);
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
            UNROLLED(long kx = 0; kx < KERNEL_WIDTH; ++kx) read[kx] = load(at + kx * EXAMPLES + j);
            if (j < from) UNROLLED(long kx = 0; kx < KERNEL_WIDTH; ++kx) read[kx] *= fresh;
            UNROLLED(long t = 0; t < TOGETHER; ++t) {
              const Vector slope = load(down + t * OUT_PLANE + j);
              UNROLLED(long kx = 0; kx < KERNEL_WIDTH; ++kx) partial[t][kx] += read[kx] * slope;
            }
          }
          UNROLLED(long t = 0; t < TOGETHER; ++t)
            UNROLLED(long kx = 0; kx < KERNEL_WIDTH; ++kx) row_sums[t][kx] = partial[t][kx];
        }
      for (long t = 0; t < TOGETHER; ++t)
        for (long from = 0; from < OUT_ROW; from += LANES) {
          const long j = minimum(from, OUT_ROW - LANES);
          const Vector slope = load(down + t * OUT_PLANE + j);
          totals[o + t] += j < from ? slope * fresh : slope;
        }
    }
  for (long o = 0; o < OUT; ++o) {
    bias[o] = total(totals[o]);
    for (long ky = 0; ky < KERNEL_HEIGHT; ++ky)
      for (long kx = 0; kx < KERNEL_WIDTH; ++kx)
        for (long i = 0; i < IN; ++i) *weight++ = total(sums[o / TOGETHER][ky][i][o % TOGETHER][kx]);
  }
}

#else

// Max-pooling has a stride equal to the window. Calls a function for each vector of EXAMPLES windows, with the position
// of the window's first pixel in the image and that of its maximum in the output.
template <typename Function>
static inline void for_each_window(Function function) {
  long pooled = 0;
  for (long i = 0; i < IN; ++i)
    for (long y = 0; y < HEIGHT / KERNEL_HEIGHT; ++y)
      for (long x = 0; x < WIDTH / KERNEL_WIDTH; ++x, pooled += EXAMPLES)
        for (long from = 0; from < EXAMPLES; from += LANES) {
          const long e = minimum(from, EXAMPLES - LANES);
          function(i * PLANE + y * KERNEL_HEIGHT * ROW + x * KERNEL_WIDTH * EXAMPLES + e, pooled + e);
        }
}

constexpr long WINDOW = KERNEL_HEIGHT * KERNEL_WIDTH;
constexpr long pixel(long w) { return w / KERNEL_WIDTH * ROW + w % KERNEL_WIDTH * EXAMPLES; }

// The maximum of each window, or NaN if it contains one.
extern "C" void max_pool(const float* image, float* out) {
  for_each_window([=](long corner, long pooled) {
    Vector largest = load(image + corner);
    UNROLLED(long w = 1; w < WINDOW; ++w) {
      const Vector read = load(image + corner + pixel(w));
      largest = (read > largest) | (read != read) ? read : largest;
    }
    store(out + pooled, largest);
  });
}

// The gradient of max-pooling: all of it goes to each window's first maximum.
extern "C" void max_pool_gradient(const float* image, const float* gradient, float* out) {
  for_each_window([=](long corner, long pooled) {
    Vector read[WINDOW], rest = load(gradient + pooled);
    UNROLLED(long w = 0; w < WINDOW; ++w) read[w] = load(image + corner + pixel(w));
    Vector largest = read[0];
    UNROLLED(long w = 1; w < WINDOW; ++w) largest = read[w] > largest ? read[w] : largest;
    UNROLLED(long w = 0; w < WINDOW; ++w) {
      const auto hit = read[w] == largest;
      store(out + corner + pixel(w), hit ? rest : Vector{});
      rest = hit ? Vector{} : rest;
    }
  });
}

#endif
