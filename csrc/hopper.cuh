// csrc/hopper.cuh: Hopper's own instructions: warpgroup products (wgmma), tensor copies (TMA), mbarriers. sm_90a only.
//   wgmma, one warpgroup (4 warps), D [64 x N] f32 += A [64 x 16] B [16 x N]; thread 32 w + 4 g + t of it holds of D
//     d[4 j], d[4 j + 1]      row 16 w + g,     columns 8 j + 2 t, 8 j + 2 t + 1
//     d[4 j + 2], d[4 j + 3]  row 16 w + g + 8, the same columns
//   and of an A in registers what mma.sync's A fragment of rows 16 w .. 16 w + 15 holds (mma.cuh).
//   Operands in shared memory are boxes of 64 rows of 128 bytes as TMA writes them with the 128-byte swizzle: 16-byte
//   chunk c of row r stands at chunk c ^ (r % 8). A box starts at a multiple of 1,024 bytes.
//   test through csrc/verify_attention_wgmma.cu
#pragma once

#include "common.cuh"

// ---- descriptors of boxes in shared memory (PTX ISA, "Matrix-descriptor") ------------------------------------------

constexpr u32 BOX_BYTES = 64 * 128;
constexpr u64 SWIZZLE_128B = u64(1) << 62;

// `place` is an address in units of 16 bytes, without the upper bits that name a block of a cluster.
DEVICE u64 descriptor(u32 place, u32 leading_bytes, u32 stride_bytes) {
  return SWIZZLE_128B | u64(stride_bytes >> 4) << 32 | (place + (leading_bytes >> 4 << 16));
}

// Rows are M or N, the 128 bytes run along K (64 values): 2 places further on are the next 16 values of K. Groups of
// 8 rows lie 1,024 bytes apart; a row is one swizzle atom wide, so the leading offset is not read.
DEVICE u64 descriptor_k_major(u32 place) { return descriptor(place, 16, 1024); }

// Rows are K, the 128 bytes run along N: 128 places further on are the next 16 rows of K; the next 64 values of N
// stand in the next box, which may have fewer rows than 64.
DEVICE u64 descriptor_n_major(u32 place, u32 box_bytes = BOX_BYTES) { return descriptor(place, box_bytes, 1024); }

// ---- wgmma -------------------------------------------------------------------------------------------------------

#define WGMMA_D32                                                                                        \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"  \
  "%27,%28,%29,%30,%31}"
#define WGMMA_D16 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}"
#define WGMMA_D128                                                                                       \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"  \
  "%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51," \
  "%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76," \
  "%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,"    \
  "%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120," \
  "%121,%122,%123,%124,%125,%126,%127}"
#define F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(d, i) F4(d, i), F4(d, i + 4), F4(d, i + 8), F4(d, i + 12)
#define F32(d, i) F16(d, i), F16(d, i + 16)
#define F128(d) F32(d, 0), F32(d, 32), F32(d, 64), F32(d, 96)

// Products of -DDTYPE=1 (bf16) or 2 (half).
#if DTYPE == 2
#define WGMMA(shape) "wgmma.mma_async.sync.aligned." shape ".f32.f16.f16 "
#else
#define WGMMA(shape) "wgmma.mma_async.sync.aligned." shape ".f32.bf16.bf16 "
#endif

// D [64 x 64] = (accumulate ? D : 0) + A B; A and B K-major in shared memory.
DEVICE void wgmma_narrow(float (&d)[32], u64 a, u64 b, int accumulate) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0;\n" WGMMA("m64n64k16") WGMMA_D32 ", %32, %33, p, 1, 1, 0, 0;}"
               : F32(d, 0)
               : "l"(a), "l"(b), "r"(accumulate));
}

// The same with A in registers.
DEVICE void wgmma_narrow(float (&d)[32], const u32* a, u64 b, int accumulate) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0;\n" WGMMA("m64n64k16") WGMMA_D32
               ", {%32,%33,%34,%35}, %36, p, 1, 1, 0;}"
               : F32(d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

// D [64 x 32], likewise.
DEVICE void wgmma_narrow(float (&d)[16], u64 a, u64 b, int accumulate) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %18, 0;\n" WGMMA("m64n32k16") WGMMA_D16 ", %16, %17, p, 1, 1, 0, 0;}"
               : F16(d, 0)
               : "l"(a), "l"(b), "r"(accumulate));
}
DEVICE void wgmma_narrow(float (&d)[16], const u32* a, u64 b, int accumulate) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %21, 0;\n" WGMMA("m64n32k16") WGMMA_D16
               ", {%16,%17,%18,%19}, %20, p, 1, 1, 0;}"
               : F16(d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

// D [64 x 256] += A B; A K-major and B N-major in shared memory.
DEVICE void wgmma_n256(float (&d)[128], u64 a, u64 b) {
  asm volatile(WGMMA("m64n256k16") WGMMA_D128 ", %128, %129, 1, 1, 1, 0, 1;" : F128(d) : "l"(a), "l"(b));
}

// The same with A in registers.
DEVICE void wgmma_n256(float (&d)[128], const u32* a, u64 b) {
  asm volatile(WGMMA("m64n256k16") WGMMA_D128 ", {%128,%129,%130,%131}, %132, 1, 1, 1, 1;"
               : F128(d)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Before the first product after registers of it were written.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING groups are under way; `d` may be read only after a wait that names it.
template <int PENDING>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(PENDING) : "memory");
}
template <int PENDING>
DEVICE void wgmma_wait(float (&d)[16]) {
  asm volatile("wgmma.wait_group.sync.aligned %16;" : F16(d, 0) : "n"(PENDING) : "memory");
}
template <int PENDING>
DEVICE void wgmma_wait(float (&d)[32]) {
  asm volatile("wgmma.wait_group.sync.aligned %32;" : F32(d, 0) : "n"(PENDING) : "memory");
}
template <int PENDING>
DEVICE void wgmma_wait(float (&d)[128]) {
  asm volatile("wgmma.wait_group.sync.aligned %128;" : F128(d) : "n"(PENDING) : "memory");
}

// ---- mbarriers ---------------------------------------------------------------------------------------------------

DEVICE void mbarrier_init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" : : "r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers known to the copy engine and to the other blocks of the cluster.
DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// This thread's arrival, and so many bytes that copies will bring.
DEVICE void mbarrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" : : "r"(barrier), "r"(bytes) : "memory");
}

// -DHANG_TRAP ends a kernel that waits for ever, for whoever looks for the reason.
struct HangWatch {
#ifdef HANG_TRAP
  i64 start = clock64();
  DEVICE void look() const {
    if (clock64() - start > 100000000) asm volatile("trap;");
  }
#else
  DEVICE void look() const {}
#endif
};

// Waits for the end of the phase with this parity (0 for the first).
DEVICE void mbarrier_wait(u32 barrier, u32 parity) {
  u32 done = 0;
  const HangWatch watch;
  while (true) {
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    if (done) return;
    watch.look();
  }
}

// ---- copies and proxies ------------------------------------------------------------------------------------------

struct alignas(64) TensorMap {
  u64 opaque[16];
};

DEVICE void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" : : "l"(&map) : "memory");
}

// One box from global to shared memory; its bytes arrive at `barrier`. x counts values, y rows.
DEVICE void copy_box(u32 shared, const TensorMap& map, int x, int y, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
      :
      : "r"(shared), "l"(&map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}
DEVICE void copy_box(u32 shared, const TensorMap& map, int x, int y, int z, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
      :
      : "r"(shared), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

// Waits for all that this thread asked for with copy_async of any size (mma.cuh).
DEVICE void copy_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Between this thread's ordinary writes to shared memory and a barrier after which wgmma or TMA meets them.
DEVICE void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Four 8 x 8 matrices of 16-bit values to shared memory: the reverse of load_matrices (mma.cuh).
DEVICE void store_matrices(u32 address, u32 r0, u32 r1, u32 r2, u32 r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
               :
               : "r"(address), "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

// ---- clusters ----------------------------------------------------------------------------------------------------

DEVICE int cluster_size() {
  u32 n;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(n));
  return n;
}
DEVICE int cluster_rank() {
  u32 n;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(n));
  return n;
}
// Releases nothing: mbarrier_init_fence has made the barriers known.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The address, for the instructions of a cluster, of what stands at `shared` in the block of this rank.
DEVICE u32 remote_address(u32 shared, int rank) {
  u32 address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}

// Waits for what other blocks of the cluster send.
DEVICE void mbarrier_wait_cluster(u32 barrier, u32 parity) {
  u32 done = 0;
  const HangWatch watch;
  while (true) {
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    if (done) return;
    watch.look();
  }
}
