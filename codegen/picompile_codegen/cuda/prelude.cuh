// What kernels of TVM's CUDA code generator need, and a few functions that TIR has no words for. It stands before the
// kernels in the place of TVM's own header, which serves many data types that no kernel here has.
#include <cuda_fp16.h>

#define uint unsigned int
#define uchar unsigned char
#define ushort unsigned short
typedef long long pi_int64;
#define int64_t pi_int64
#define uint64_t unsigned long long
#define int32_t int
#define uint32_t unsigned int

// Four halves that are loaded together. TVM gives this type a name, and leaves it to its own header.
struct alignas(8) half4 {
  half x, y, z, w;
};

// Returns the four bits of `word` from `shift` on times 2^-22, less `zero`, which is 8 times that unless given. Exact where
// the difference is a float.
//
// The bits stay in their place, so that one instruction of the integer pipe masks them. A word n * 2^shift below 2^24,
// read as a float, is the subnormal number n * 2^(shift - 149) (or the least normal ones, which have the same step). One
// fma scales it and subtracts the offset. GPUs compute with subnormal numbers at full speed, and NVRTC keeps them
// (--ftz=false). No float is larger than 2^128, so the lowest place cannot be scaled by 2^149: hence the 2^-22.
static __device__ __forceinline__ float pi_nibble(uint word, int shift, float zero = 8.0f / 4194304.0f) {
  int moved = shift < 24 ? 0 : shift < 28 ? 4 : 28;
  return __uint_as_float((word >> moved) & (15u << (shift - moved))) * __uint_as_float((254u - (shift - moved)) << 23) -
         zero;
}

// Returns the low six bits of byte `index` of `word`, less 32.
static __device__ __forceinline__ float pi_six_bits(uint word, int index) {
  return __uint_as_float(__byte_perm(word & 0x3F3F3F3Fu, 0x4B000000u, 0x7440 | index)) - 8388640.0f;
}

// Byte `index` of `word`, signed.
static __device__ __forceinline__ float pi_byte(uint word, int index) {
  uint shifted = word ^ 0x80808080u;  // 128 more, so that none is negative
  return __uint_as_float(__byte_perm(shifted, 0x4B000000u, 0x7440 | index)) - 8388736.0f;
}

// Byte `index` of `word`, without a sign, less `zero`, a whole number.
static __device__ __forceinline__ float pi_code(uint word, int index, float zero) {
  return __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7440 | index)) - (8388608.0f + zero);
}

// The E4M3 number of byte `index` of `word`. With its exponent and mantissa in their places, a float is 2^-120 of it.
static __device__ __forceinline__ float pi_e4m3(uint word, int index) {
  uint high = word << (24 - 8 * index);
  return __uint_as_float((high & 0x80000000u) | ((high >> 4) & 0x07F00000u)) * 0x1p120f;
}

// The float whose four bytes are byte `index` of each word, the lowest first.
static __device__ __forceinline__ float pi_float_of(uint a, uint b, uint c, uint d, int index) {
  uint selector = (uint)index | (uint)(index + 4) << 4;
  return __uint_as_float(__byte_perm(__byte_perm(a, b, selector), __byte_perm(c, d, selector), 0x5410));
}

// The power of two whose exponent plus 127 is `stored`, but 0 for 0.
static __device__ __forceinline__ float pi_power(uchar stored) { return __uint_as_float((uint)stored << 23); }

// Looks up four codes of four bits, the low half of `codes`, in a table of 16 bytes: four words, the first one lowest.
static __device__ __forceinline__ uint pi_four_entries(uint codes, uint a, uint b, uint c, uint d) {
  uint places = codes & 0x7777u;
  return __byte_perm(__byte_perm(a, b, places), __byte_perm(c, d, places), 0x3210u | ((codes & 0x8888u) >> 1));
}

// Looks up the low (`half` is 0) or the high four bits of each byte of `word` in such a table.
static __device__ __forceinline__ uint pi_look_up(uint word, int half, uint a, uint b, uint c, uint d) {
  return __byte_perm(pi_four_entries(word, a, b, c, d), pi_four_entries(word >> 16, a, b, c, d), half ? 0x7531 : 0x6420);
}

// D += A B, with A [16, 16], B [16, 8]; instructions.cuh says which lane has what.
static __device__ __forceinline__ void pi_mma(float *d, const uint *a, const uint *b) {
#if PI_SM >= 80
  pi_mma_m16n8k16(d, a, b);
#else
  pi_mma_m16n8k8(d, a, b);
  pi_mma_m16n8k8(d, a + 2, b + 1);
#endif
}

// Blocks with a large tile of products that a multiprocessor holds; that of 7.5 has shared memory for one.
#define PI_LARGE_TILES (PI_SM >= 80 ? 2 : 1)

// Pairs of halves are words: the first is in the low bits.
static __device__ __forceinline__ uint pi_pair(half2 pair) { return *(uint *)&pair; }
static __device__ __forceinline__ half2 pi_halves(uint pair) { return *(half2 *)&pair; }
static __device__ __forceinline__ uint pi_both(half value) { return pi_pair(__half2half2(value)); }
static __device__ __forceinline__ uint pi_pair_of(float first, float second) {
  return pi_pair(__floats2half2_rn(first, second));
}

// The value, or the largest half if it is a larger number; what is no number, or infinite, stays what it is.
static __device__ __forceinline__ float pi_in_range(float value) {
  float magnitude = fabsf(value);
  return magnitude > 65504.0f && magnitude <= 3.4028234e38f ? copysignf(65504.0f, value) : value;
}

// Rounds two, four or eight floats to halves side by side, at an address that is a multiple of their size.
static __device__ __forceinline__ void pi_store_halves(void *to, float a, float b) { *(uint *)to = pi_pair_of(a, b); }
static __device__ __forceinline__ void pi_store_halves(void *to, float a, float b, float c, float d) {
  *(uint2 *)to = make_uint2(pi_pair_of(a, b), pi_pair_of(c, d));
}
static __device__ __forceinline__ void pi_store_halves(void *to, float a, float b, float c, float d, float e, float f,
                                                       float g, float h) {
  *(uint4 *)to = make_uint4(pi_pair_of(a, b), pi_pair_of(c, d), pi_pair_of(e, f), pi_pair_of(g, h));
}

// Copies 16 bytes to shared memory, or writes zeros there unless `is_there`. The thread itself sees them behind
// `pi_copies_arrived`, and others behind a barrier after that.
static __device__ __forceinline__ void pi_copy_16(void *shared, const void *source, int is_there) {
#if PI_SM >= 80
  pi_cp_async_16(shared, source, is_there ? 16 : 0);
#else
  *(uint4 *)shared = is_there ? *(const uint4 *)source : make_uint4(0, 0, 0, 0);
#endif
}

static __device__ __forceinline__ void pi_copies_arrived() {
#if PI_SM >= 80
  pi_cp_async_wait_all();
#endif
}

static __device__ __forceinline__ uint pi_less(uint pair, uint other) {
  return pi_pair(__hsub2(pi_halves(pair), pi_halves(other)));
}
static __device__ __forceinline__ uint pi_times(uint pair, uint other) {
  return pi_pair(__hmul2(pi_halves(pair), pi_halves(other)));
}

// Two codes as halves, less `zero`: of bytes 2 `part` and 2 `part` + 1 of `word` the low four bits, the high four, the low
// six, or the whole, signed byte. Exact: with a byte 0x64 above it, a code n is the half 1024 + n, or 1024 + 16 n.
static __device__ __forceinline__ uint pi_raised(uint word, int part) {
  return __byte_perm(word, 0x64646464u, part ? 0x4342 : 0x4140);
}
static __device__ __forceinline__ uint pi_low_codes(uint word, int part, float zero) {
  return pi_less(pi_raised(word, part) & 0xFF0FFF0Fu, pi_both(__float2half_rn(1024.0f + zero)));
}
static __device__ __forceinline__ uint pi_high_codes(uint word, int part, float zero) {
  half2 raised = pi_halves(pi_raised(word, part) & 0xFFF0FFF0u);
  return pi_pair(__hfma2(raised, __float2half2_rn(0.0625f), __float2half2_rn(-64.0f - zero)));
}
static __device__ __forceinline__ uint pi_six_bit_codes(uint word, int part, float zero) {
  return pi_less(pi_raised(word & 0x3F3F3F3Fu, part), pi_both(__float2half_rn(1024.0f + zero)));
}
static __device__ __forceinline__ uint pi_byte_codes(uint word, int part) {
  return pi_less(pi_raised(word ^ 0x80808080u, part), pi_both(__float2half_rn(1152.0f)));
}

// The power of two by which numbers up to `largest` become halves below 32768. It is 1 for what is not finite, so that it
// stays what it is.
static __device__ __forceinline__ float pi_power_for(float largest) {
  int exponent = (int)(__float_as_uint(largest) >> 23);
  if (exponent == 255) return 1.0f;
  return __uint_as_float((uint)min(268 - exponent, 254) << 23);
}

// A bit for each lane of the warp, set where `flag` is not 0. All lanes must ask.
static __device__ __forceinline__ uint pi_ballot(int flag) { return __ballot_sync(0xFFFFFFFFu, flag); }

// Loads written before it are under way before anything is computed from them. Without it the compiler puts each load
// next to its use, to save registers, and a warp waits for memory once for each. A barrier of the warp does not forbid
// that: ptxas leaves it out where it knows that the lanes are together. An event for a profiler, which nobody counts, is
// one instruction that ptxas moves nothing across.
static __device__ __forceinline__ void pi_loads_first() { __prof_trigger(0); }

// What lanes wrote before is seen by all lanes of the warp. All must come.
static __device__ __forceinline__ void pi_meet_warp() { __syncwarp(); }

// Two keys, the higher one first, or last if it `rises`. They change places unless they are in this order.
static __device__ __forceinline__ void pi_order(int64_t *first, int64_t *second, int rises) {
  int64_t a = *first, b = *second;
  if ((a < b) != (rises != 0)) *first = b, *second = a;
}

static __device__ __forceinline__ void pi_keep_higher(int64_t *kept, int64_t other) {
  if (*kept < other) *kept = other;
}

static __device__ __forceinline__ void pi_add_int64(int64_t *sum, int value) {
  atomicAdd((unsigned long long *)sum, (unsigned long long)(long long)value);
}

// Whether this block is the last of `blocks` to ask with this ticket, which is 0 before and after. What these blocks wrote
// before, behind a barrier of their own, the last one sees behind its next barrier.
//
// Each block releases what it wrote with its ticket. The last one's ticket follows from those of all others by atomic
// operations alone, so it acquires what all of them released. Whether it also sees what blocks write after their tickets
// does not matter.
static __device__ __forceinline__ int pi_is_last(int *ticket, int blocks) {
  return pi_inc_acq_rel_gpu((uint *)ticket, (uint)blocks - 1u) == (uint)blocks - 1u;
}

// Host and device meet at flags in memory that both see. A flag holds the number of the step in which it was last set.
// All that was written before is seen by whoever has seen the flag, and all that was read before is read.
//
// That takes a release here and an acquire in `pi_wait_for`. A side that gives up needs no more: it sets `abandoned` and
// does not look at its flag again, so both may give up, and a flag that is set at that moment stays unseen.
static __device__ __forceinline__ void pi_signal(int *flag, int step) {
  pi_store_release_sys(flag, step);
}

// A value that the other side may have written since the kernel began. What a kernel does not write, the compiler reads
// with instructions for memory that nobody changes, whose cache may be older than the flag. Not so a volatile read.
static __device__ __forceinline__ float pi_load_shared(const float *at) { return *(const volatile float *)at; }
static __device__ __forceinline__ int pi_load_shared(const int *at) { return *(const volatile int *)at; }
static __device__ __forceinline__ uchar pi_load_shared(const uchar *at) { return *(const volatile uchar *)at; }

// The bits of one, two or four bytes that the other side may have written, whatever they mean.
static __device__ __forceinline__ int pi_load_shared_byte(const void *at) { return *(const volatile uchar *)at; }
static __device__ __forceinline__ int pi_load_shared_half(const void *at) {
  return *(const volatile unsigned short *)at;
}
static __device__ __forceinline__ int pi_load_shared_word(const void *at) { return *(const volatile int *)at; }
static __device__ __forceinline__ void pi_store_byte(void *at, int bits) { *(uchar *)at = (uchar)bits; }
static __device__ __forceinline__ void pi_store_half(void *at, int bits) { *(unsigned short *)at = (unsigned short)bits; }
static __device__ __forceinline__ void pi_store_word(void *at, int bits) { *(int *)at = bits; }

#ifdef __CUDA_ARCH__  // where there is no GPU, its emulation has a clock
static __device__ __forceinline__ uint64_t pi_now_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
#endif

#ifndef PI_PATIENCE_NS  // tests have less
#define PI_PATIENCE_NS 30000000000ull
#endif

// Whoever gives up says in `abandoned` for which flag it waited, as a distance in bytes, and what that held; native/host.c
// says where.
static __device__ __forceinline__ void pi_give_up(const int *flag, int *abandoned) {
  ((volatile int *)abandoned)[3] = (int)((const char *)flag - (const char *)abandoned);
  ((volatile int *)abandoned)[4] = *(const volatile int *)flag;
  pi_signal(abandoned, 1);
}

// Waits until `flag` holds `step`, or until either side gives up, which sets `abandoned`. Whoever waits for `patience_ns`
// gives up: a host that has failed sets no flag. Both words are asked for before one is looked at, since each of them
// takes as long as the bus does there and back. The clock is read once in a millisecond or so.
static __device__ __forceinline__ void pi_wait_for(const int *flag, int *abandoned, int step, uint64_t patience_ns) {
  uint64_t end = pi_now_ns() + patience_ns;
  do {
#pragma unroll 1
    for (int polls = 0; polls < 1024; ++polls) {
      int set = *(const volatile int *)flag, given_up = *(const volatile int *)abandoned;
      if (set == step || given_up != 0) {
        pi_fence_acq_rel_sys();
        return;
      }
      __nanosleep(100);
    }
  } while (pi_now_ns() < end);
  pi_give_up(flag, abandoned);
}

// As long as no step takes.
static __device__ __forceinline__ void pi_wait(const int *flag, int *abandoned, int step) {
  pi_wait_for(flag, abandoned, step, PI_PATIENCE_NS);
}

// A GPU that drives a display ends kernels that take two seconds.
#define PI_PING_PATIENCE_NS 1500000000ull

// Answers the host `rounds` times, each time with what it has sent: lane i of the warp with one of 32 words. The other
// side is `pi_ping_pong` of native/host.c. All lanes must come.
static __device__ __forceinline__ void pi_ping_pong(const int *ping, int *pong, int *abandoned, const int *sent,
                                                    int *echoed, int rounds, int lane) {
#pragma unroll 1
  for (int round = 1; round <= rounds; ++round) {
    if (lane == 0) pi_wait_for(ping, abandoned, round, PI_PING_PATIENCE_NS);
    pi_meet_warp();
    if (*(volatile int *)abandoned != 0) return;
    int at = (round * 32 + lane) & 1023;
    *(volatile int *)(echoed + at) = pi_load_shared(sent + at);
    pi_meet_warp();
    if (lane == 0) pi_signal(pong, round);
  }
}
