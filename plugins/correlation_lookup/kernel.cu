// RAFT's correlation lookup without the all-pairs volume.
//
// Compiled with -DRADIUS=<int> -DHALF=<0 or 1>; needs no headers. All tensors are contiguous:
// features [N, H, W, C], each level [N, h, w, C], coordinates [N, 2, H, W] (x, y in pixels of
// level 0), windows [N, LEVELS * WINDOW * WINDOW, H, W].
//
// A block takes QUERIES neighbouring pixels of a row and one level; a warp takes one of them. In a
// warp, eight lanes share a position of the second map (each reads 16 consecutive bytes at a
// time), so four groups of lanes work on AT_ONCE positions each. Dot products are taken in float at
// the SIDE * SIDE whole positions round the centre, and then blended: the window's points all have
// the same fractional part.
//
// Launch: grid (ceil(W / QUERIES), H, N * LEVELS), block QUERIES * 32 threads,
// QUERIES * C * sizeof(float) bytes of dynamic shared memory.

#define LEVELS 4
#define QUERIES 8
#define GROUP 8  // lanes that share a position
#define WINDOW (2 * RADIUS + 1)
#define SIDE (2 * RADIUS + 2)
#define POSITIONS (SIDE * SIDE)
#define AT_ONCE (POSITIONS % 20 == 0 ? 5 : 4)
#define FAR_AWAY (1 << 24)  // beyond any map, and an int with room for the window's offsets

#if HALF
typedef unsigned short Feature;

__device__ __forceinline__ float to_float(Feature value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value));
  return result;
}

__device__ __forceinline__ Feature from_float(float value) {
  Feature result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(value));
  return result;
}

__device__ __forceinline__ float4 load4(const Feature* from) {
  const ushort4 four = *reinterpret_cast<const ushort4*>(from);
  return make_float4(to_float(four.x), to_float(four.y), to_float(four.z), to_float(four.w));
}
#else
typedef float Feature;

__device__ __forceinline__ float to_float(Feature value) { return value; }
__device__ __forceinline__ Feature from_float(float value) { return value; }
__device__ __forceinline__ float4 load4(const Feature* from) {
  return *reinterpret_cast<const float4*>(from);
}
#endif

// The whole part of a coordinate; beyond every map for what is no number or too large for an int.
__device__ __forceinline__ int whole(float coordinate) {
  const float origin = floorf(coordinate);
  return origin > -FAR_AWAY && origin < FAR_AWAY ? static_cast<int>(origin) : -FAR_AWAY;
}

extern "C" __global__ void __launch_bounds__(QUERIES * 32) correlation_lookup(
    const Feature* __restrict__ features, const Feature* __restrict__ level_0,
    const Feature* __restrict__ level_1, const Feature* __restrict__ level_2,
    const Feature* __restrict__ level_3, const float* __restrict__ coordinates,
    Feature* __restrict__ windows, int height, int width, int channels, int height_0, int width_0,
    int height_1, int width_1, int height_2, int width_2, int height_3, int width_3) {
  extern __shared__ float4 shared[];  // QUERIES * channels floats: the pixels' own features
  __shared__ float dots[QUERIES][POSITIONS];
  __shared__ float blend_x[QUERIES], blend_y[QUERIES];

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = lane / GROUP, member = lane % GROUP;
  const int number = blockIdx.z % LEVELS;
  const long long image = blockIdx.z / LEVELS;
  const int y = blockIdx.y, x = blockIdx.x * QUERIES + warp;
  const Feature* level =
      number == 0 ? level_0 : number == 1 ? level_1 : number == 2 ? level_2 : level_3;
  const int level_height =
      number == 0 ? height_0 : number == 1 ? height_1 : number == 2 ? height_2 : height_3;
  const int level_width =
      number == 0 ? width_0 : number == 1 ? width_1 : number == 2 ? width_2 : width_3;
  float* own = reinterpret_cast<float*>(shared) + warp * channels;

  if (x < width) {  // the same for the whole warp
    const long long area = static_cast<long long>(height) * width;
    const float* centre = coordinates + image * 2 * area + static_cast<long long>(y) * width + x;
    const float scale = 1.0f / (1 << number);
    const float centre_x = centre[0] * scale, centre_y = centre[area] * scale;
    const int left = whole(centre_x) - RADIUS, top = whole(centre_y) - RADIUS;
    if (lane == 0) {
      blend_x[warp] = centre_x - floorf(centre_x);
      blend_y[warp] = centre_y - floorf(centre_y);
    }
    const Feature* mine = features + ((image * height + y) * width + x) * channels;
    for (int c = lane; c < channels; c += 32) own[c] = to_float(mine[c]);
    __syncwarp();

    const float root = sqrtf(static_cast<float>(channels));
    const bool by_four = channels % 4 == 0;
    for (int first = 0; first < POSITIONS; first += AT_ONCE * 32 / GROUP) {
      const Feature* near[AT_ONCE];
      bool inside[AT_ONCE];
      float sum[AT_ONCE];
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k) {
        const int position = first + k * (32 / GROUP) + group;
        const int column = left + position % SIDE, row = top + position / SIDE;
        inside[k] = position < POSITIONS && column >= 0 && column < level_width && row >= 0 &&
                    row < level_height;
        const long long place = inside[k] ? (image * level_height + row) * level_width + column : 0;
        near[k] = level + place * channels;
        sum[k] = 0.0f;
      }
      if (by_four) {
        for (int c = member * 4; c < channels; c += GROUP * 4) {
          const float4 a = *reinterpret_cast<const float4*>(own + c);
#pragma unroll
          for (int k = 0; k < AT_ONCE; ++k) {
            if (inside[k]) {
              const float4 b = load4(near[k] + c);
              sum[k] += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
            }
          }
        }
      } else {
        for (int c = member; c < channels; c += GROUP) {
#pragma unroll
          for (int k = 0; k < AT_ONCE; ++k) {
            if (inside[k]) sum[k] += own[c] * to_float(near[k][c]);
          }
        }
      }
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k) {
        for (int offset = GROUP / 2; offset > 0; offset /= 2) {
          sum[k] += __shfl_xor_sync(0xffffffff, sum[k], offset);
        }
        const int position = first + k * (32 / GROUP) + group;
        if (member == 0 && position < POSITIONS) dots[warp][position] = sum[k] / root;
      }
    }
  }
  __syncthreads();

  // neighbouring threads write neighbouring pixels
  for (int item = threadIdx.x; item < QUERIES * WINDOW * WINDOW; item += QUERIES * 32) {
    const int query = item % QUERIES, point = item / QUERIES;
    const int column = point / WINDOW, row = point % WINDOW;  // the offset in x changes slowest
    const int to_x = blockIdx.x * QUERIES + query;
    if (to_x >= width) continue;
    const float* above = &dots[query][row * SIDE + column];
    const float* below = above + SIDE;
    const float upper = above[0] + (above[1] - above[0]) * blend_x[query];
    const float lower = below[0] + (below[1] - below[0]) * blend_x[query];
    const long long plane = (image * LEVELS + number) * WINDOW * WINDOW + point;
    windows[(plane * height + y) * width + to_x] =
        from_float(upper + (lower - upper) * blend_y[query]);
  }
}
