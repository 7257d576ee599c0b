// csrc/verify_parts.cu: last step of a tree attention whose tiles go in parts: adds them up. Behind
//   csrc/verify_attention_wgmma.cu with -DPARTS=1.
//   in   partial, partial_lse as verify_attention_wgmma.cu leaves them | prefix_len [S] i32 and num_nodes [S] i32, from
//        which the division follows as there
//   out  o [S,N,H,512] bf16 or half (-DDTYPE) | lse [S,N,H] f32, nats; rows of tiles that have more than one part
//   math w_i = 2^(lse_i - max lse), o = sum_i w_i o_i / sum_i w_i, lse = max + log2(sum_i w_i)
//   cost the bytes of the parts, read once, from the L2 cache
//   how  A warp adds a piece of 8 rows, so that rows of nobody cost nothing: of 64 columns where parts are few, else of
//        32, and then a block of threads [32, pieces, shares] shares out the parts along z. All parts of a share come
//        at once by asynchronous copies: ptxas puts ordinary loads between the sums, where each waits for the L2 cache
//        on its own. The kernel starts while the parts are under way and waits for their end.
//   ref  kernels/reference/ops.py:verify_attention | test tests/kernels/test_verify_wgmma.py | sm_90a
#include "fresh.cuh"
#include "verify_wgmma_merge.cuh"

constexpr int BATCH = 2;      // parts that are added at a time
constexpr int FEW_WORDS = 2;  // of a thread where parts are few
constexpr int ROWS = 8, EIGHTHS = Config::TILE / ROWS;  // of a piece, and of a tile
constexpr int PAIRS = 4, TOP = 0, TOTAL = 1, SUMS = 2, VALUES = SUMS + 2 * PAIRS;

struct Share {  // of a warp, among several of a piece
  float values[VALUES][WARP];  // of an Added<1>
  u32 found[PAIRS][WARP];      // of the whole piece, in the first share
};
template <int N>
struct Slot {  // for a part under way
  uint4 words[N][WARP];
  float lse[ROWS];
};

// Adds the parts of a tile that this warp's share has: N words from `word` on.
template <int N>
DEVICE void add_share(const Params& p, Slot<N>* mine, int slots, Added<N>& sum, int tile, int parts, int most, int word,
                      int group, int eighth) {
  const int lane = lane_id(), share = threadIdx.z, shares = blockDim.z;
  const uint4* in = p.partial + place_of_word(word, eighth % 2, group * 128 + eighth / 2 * WARP + lane);
  const float* in_lse = p.partial_lse + ROWS * eighth + 4 * (lane % 2);
#pragma unroll 1
  for (int first = share; first < parts; first += slots * shares) {
    const int own = min(slots, cdiv(parts - first, shares));
    const uint4* from = in + i64(part_slot(tile, first, most)) * PART_WORDS;
#pragma unroll 2
    for (int i = 0; i < round_up(own, BATCH); ++i) {
#pragma unroll
      for (int n = 0; n < N; ++n) copy_async(shared_address(&mine[i].words[n][lane]), from + n * WORD_STEP);
      if (i + 1 < own) from += i64(shares) * PART_WORDS;  // else the last once more, which will count for nothing
    }
    if (lane / 2 < own) {  // both halves of every part's
      const int slot = part_slot(tile, first + lane / 2 * shares, most);
      copy_async(shared_address(&mine[lane / 2].lse[4 * (lane % 2)]), in_lse + slot * Config::TILE);
    }
    copy_async_wait_all();
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < own; i += BATCH) {
      uint4 words[BATCH][N];
      float lse[BATCH];
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
#pragma unroll
        for (int n = 0; n < N; ++n) words[j][n] = mine[i + j].words[n][lane];
        lse[j] = i + j < own ? mine[i + j].lse[lane / 4] : -INFINITY_F32;
      }
      sum.add(words, lse);
    }
    __syncwarp();
  }
}

// Block (x, 0, z): of stream z the pieces blockDim.y * x and on, those of all its tiles in a row. `slots`: parts of a
// share under way, an even number up to WARP / 2.
extern "C" __global__ void __launch_bounds__(WARP * MAX_SHARES, 2)
    verify_parts(const i32* prefix_len, const i32* num_nodes, uint4* partial, float* partial_lse, Scalar* o, float* lse,
                 int num_streams, int num_rows, int num_heads, int table_width, int most, int fixed_split, int slots) {
  extern __shared__ __align__(16) u8 memory[];  // Slot [pieces, shares, slots], behind Share [pieces, shares]
  const Params p = {nullptr,     prefix_len, nullptr,   num_nodes, o,           lse, partial,     partial_lse, nullptr,
                    num_streams, num_rows,   num_heads, 0,         table_width, 0,   fixed_split, 0.0f};
  grid_dependency_launch();
  const int share = threadIdx.z, shares = blockDim.z, stream = blockIdx.z, lane = lane_id();
  const int place = (blockIdx.x * blockDim.y + threadIdx.y) * (shares == 1 ? FEW_WORDS : 1);
  const int word = place % 8, group = place / 8 % 2, eighth = place / 16 % EIGHTHS, row = ROWS * eighth + lane / 4;
  const int number = place / (16 * EIGHTHS);  // of the tile within the stream
  const int tile = stream * cdiv(num_rows * num_heads, Config::TILE) + number;
  // Lengths are read before the wait: the kernel ahead has let this one begin after its own wait, so they are final.
  const int prefix = load_fresh(prefix_len + stream), nodes = load_fresh(num_nodes + stream);
  const Segment seg = part_of_tile(p, stream, number, 0, most, last_row(number, num_heads), prefix, nodes);
  const bool used = is_used(p, seg, eighth);
  grid_dependency_wait();
  if (seg.parts <= 1) return;  // the block that did the tile has written it
  if (shares == 1) {
    Slot<FEW_WORDS>* mine = reinterpret_cast<Slot<FEW_WORDS>*>(memory) + threadIdx.y * slots;
    Added<FEW_WORDS> sum;
    if (used) add_share(p, mine, slots, sum, tile, seg.parts, most, word, group, eighth);
    write_added(p, seg, sum, word, group, row);
    return;
  }
  Share* all = reinterpret_cast<Share*>(memory) + threadIdx.y * shares;
  if (used) {
    Slot<1>* under_way = reinterpret_cast<Slot<1>*>(reinterpret_cast<Share*>(memory) + blockDim.y * shares);
    Added<1> sum;
    add_share(p, under_way + (threadIdx.y * shares + share) * slots, slots, sum, tile, seg.parts, most, word, group,
              eighth);
    float (&mine)[VALUES][WARP] = all[share].values;
    mine[TOP][lane] = sum.top, mine[TOTAL][lane] = sum.total;
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; ++i) mine[SUMS + i][lane] = sum.o[i];
  }
  __syncthreads();
  // A share adds up every `shares`-th pair of columns over all shares, the first one the first.
  float log_total = -INFINITY_F32;
  for (int i = share; used && i < PAIRS; i += shares) {
    float top = NO_KEY, total = 0.0f, x = 0.0f, y = 0.0f;
#pragma unroll 4
    for (int s = 0; s < shares; ++s) top = fmaxf(top, all[s].values[TOP][lane]);
#pragma unroll 4
    for (int s = 0; s < shares; ++s) {
      const float (&from)[VALUES][WARP] = all[s].values;
      const float weight = exp2_fast(from[TOP][lane] - top);
      total = fmaf(weight, from[TOTAL][lane], total);
      x = fmaf(weight, from[SUMS + 2 * i][lane], x), y = fmaf(weight, from[SUMS + 2 * i + 1][lane], y);
    }
    const float inverse = inverse_of(total);
    all[0].found[i][lane] = pack_pair<Scalar>(x * inverse, y * inverse);
    log_total = log_sum(top, total);
  }
  __syncthreads();
  if (share > 0) return;
  // Thread t of a quad writes its word t, 8 columns that the quad has found.
  const Place out = place_of(p, seg, group, word, row);
  const uint4 columns = *reinterpret_cast<const uint4*>(&all[0].found[lane % 4][lane / 4 * 4]);
  if (out.exists) __stcg(reinterpret_cast<uint4*>(out.out), out.used ? columns : uint4{0, 0, 0, 0});
  if (word == 0 && group == 0 && lane % 4 == 0) write_lse(p, seg, log_total, row);
}
