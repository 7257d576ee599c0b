// csrc/pack_words.cu: tensors side by side as 32-bit words, a row a stream: what a round leaves for the host.
//   in   FIELDS tensors [S,...], contiguous, and where each one's words begin in a row, with their kind (`place`)
//   out  out [S,W] i32
//   math values of 4 bytes by their bits, bool as 0 or 1, i64 by its low half
//   cost 8 bytes a word; the time is a launch
//   ref  kernels/pack_words.py | test tests/kernels/test_pack_words.py | archs all
#include "fresh.cuh"

constexpr int THREADS = 256;
constexpr int KIND_BITS = 2;  // of a place: its first word is above them
enum Kind { WORDS, BOOLS, WIDE };

// A launch has pointers, no array of them. The places of fields that are not used are those of the end.
#define EACH_FIELD(F) \
  F(0) F(1) F(2) F(3) F(4) F(5) F(6) F(7) F(8) F(9) F(10) F(11) F(12) F(13) F(14) F(15) F(16) F(17) F(18) F(19)
#define PARAMETER(i) const void *from_##i, i32 place_##i,

// Grid (words in blocks of THREADS, S).
extern "C" __global__ void __launch_bounds__(THREADS) pack_words(EACH_FIELD(PARAMETER) i32 words, i32* out) {
  const i32 word = blockIdx.x * THREADS + threadIdx.x;
  if (word >= words) return;
  const void* from = nullptr;
  i32 begin = 0, end = words, kind = WORDS;
#define FIND(i)                                                             \
  if (word >= place_##i >> KIND_BITS) {                                     \
    from = from_##i;                                                        \
    begin = place_##i >> KIND_BITS, kind = place_##i & ((1 << KIND_BITS) - 1); \
  } else {                                                                  \
    end = min(end, place_##i >> KIND_BITS);                                 \
  }
  EACH_FIELD(FIND)
  const i64 at = i64(blockIdx.y) * (end - begin) + word - begin;
  grid_dependency_wait();
  grid_dependency_launch();
  const i32 value = kind == WORDS   ? load_fresh(static_cast<const i32*>(from) + at)
                    : kind == BOOLS ? i32(load_fresh(static_cast<const u8*>(from) + at))
                                    : i32(load_fresh(static_cast<const i64*>(from) + at));
  out[i64(blockIdx.y) * words + word] = value;
}
