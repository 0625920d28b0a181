// The same bits as `blockwise.py`, in one pass over memory. Compiled by `blockwise_cpu.py`, without contraction of a
// product and a sum, which would round once where the twin rounds twice.
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr float kRound = 12582912.0f;  // 1.5 * 2**23: what is added to it is rounded to a whole number, halves to even
constexpr uint32_t kFinite = 0x7f800000u;

template <int bits>
struct Block {
  static constexpr int size = bits == 8 ? 256 : bits == 4 ? 128 : 1024;
  static constexpr int codes = size * bits / 8;
  static constexpr int bytes = codes + 4;
};

// The largest absolute value by its bits: numbers that are none are larger than infinity, which is larger than the rest.
template <int size>
inline float largest_of(const float* x) {
  uint32_t most = 0;
  uint32_t words[size];
  std::memcpy(words, x, sizeof(words));
  for (int i = 0; i < size; ++i) {
    const uint32_t word = words[i] & 0x7fffffffu;
    most = word > most ? word : most;
  }
  float found;
  std::memcpy(&found, &most, 4);
  return found;
}

template <int bits>
inline void encode_block(const float* x, const float* owed, float* left, uint8_t* out, float full) {
  using B = Block<bits>;
  float values[B::size];
  float codes[B::size];
  if (owed) {
    for (int i = 0; i < B::size; ++i) values[i] = x[i] + owed[i];
  } else {
    std::memcpy(values, x, sizeof(values));
  }
  const float largest = largest_of<B::size>(values);
  uint32_t word;
  std::memcpy(&word, &largest, 4);
  const bool finite = word < kFinite;
  float inverse = full / largest;
  const bool usable = finite && std::isfinite(inverse);
  const float scale = usable || !finite ? largest / full : 0.0f;
  if (usable) {
    for (int i = 0; i < B::size; ++i) codes[i] = (values[i] * inverse + kRound) - kRound;
  } else {
    for (int i = 0; i < B::size; ++i) codes[i] = 0.0f;
  }
  if (left) {
    for (int i = 0; i < B::size; ++i) left[i] = values[i] - codes[i] * scale;
  }
  if (bits == 8) {
    for (int i = 0; i < B::size; ++i) out[i] = static_cast<uint8_t>(static_cast<int8_t>(static_cast<int32_t>(codes[i])));
  } else {
    constexpr int half = B::size / 2;
    for (int i = 0; i < half; ++i) {
      const int32_t low = static_cast<int32_t>(codes[i]) + 8, high = static_cast<int32_t>(codes[i + half]) + 8;
      out[i] = static_cast<uint8_t>(low | (high << 4));
    }
  }
  std::memcpy(out + B::codes, &scale, 4);
}

// One bit: whether a number is negative, and the mean of what numbers are without signs, summed in halves.
inline void encode_signs(const float* x, const float* owed, float* left, uint8_t* out, int count) {
  using B = Block<1>;
  constexpr int eighth = B::size / 8;
  float values[B::size];
  float total[B::size / 2];
  if (owed) {
    for (int i = 0; i < B::size; ++i) values[i] = x[i] + owed[i];
  } else {
    std::memcpy(values, x, sizeof(values));
  }
  for (int i = 0; i < B::size / 2; ++i) total[i] = std::fabs(values[i]) + std::fabs(values[i + B::size / 2]);
  for (int half = B::size / 4; half >= 16; half /= 2)
    for (int i = 0; i < half; ++i) total[i] = total[i] + total[i + half];
  for (int i = 0; i < 8; ++i) total[i] = total[i] + total[i + 8];
  for (int i = 0; i < 4; ++i) total[i] = total[i] + total[i + 4];
  const float scale = ((total[0] + total[2]) + (total[1] + total[3])) / static_cast<float>(count > 1 ? count : 1);
  if (left) {
    for (int i = 0; i < B::size; ++i) left[i] = values[i] - (values[i] < 0.0f ? -scale : scale);
    for (int i = count; i < B::size; ++i) left[i] = 0.0f;
  }
  uint32_t codes[eighth];
  for (int i = 0; i < eighth; ++i) codes[i] = values[i] < 0.0f ? 1u : 0u;
  for (int k = 1; k < 8; ++k)
    for (int i = 0; i < eighth; ++i) codes[i] |= values[k * eighth + i] < 0.0f ? 1u << k : 0u;
  for (int i = 0; i < eighth; ++i) out[i] = static_cast<uint8_t>(codes[i]);
  std::memcpy(out + B::codes, &scale, 4);
}

template <int bits, bool add>
inline void decode_block(const uint8_t* in, float* out) {
  using B = Block<bits>;
  float scale;
  std::memcpy(&scale, in + B::codes, 4);
  if (bits == 8) {
    for (int i = 0; i < B::size; ++i) {
      const float value = static_cast<float>(static_cast<int8_t>(in[i])) * scale;
      out[i] = add ? out[i] + value : value;
    }
  } else if (bits == 1) {
    constexpr int eighth = B::size / 8;
    uint32_t magnitude;
    std::memcpy(&magnitude, &scale, 4);
    for (int k = 0; k < 8; ++k) {
      float* part = out + k * eighth;
      for (int i = 0; i < eighth; ++i) {
        const uint32_t said = magnitude ^ (static_cast<uint32_t>(in[i] >> k) << 31);
        float value;
        std::memcpy(&value, &said, 4);
        part[i] = add ? part[i] + value : value;
      }
    }
  } else {
    constexpr int half = B::size / 2;
    for (int i = 0; i < half; ++i) {
      const float value = static_cast<float>((in[i] & 15) - 8) * scale;
      out[i] = add ? out[i] + value : value;
    }
    for (int i = 0; i < half; ++i) {
      const float value = static_cast<float>((in[i] >> 4) - 8) * scale;
      out[half + i] = add ? out[half + i] + value : value;
    }
  }
}

template <int bits>
void encode_all(const float* x, const float* owed, float* left, uint8_t* out, int64_t blocks, float full) {
  using B = Block<bits>;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t at = b * B::size;
    encode_block<bits>(x + at, owed ? owed + at : nullptr, left ? left + at : nullptr, out + b * B::bytes, full);
  }
}

template <int bits>
void decode_all(const uint8_t* in, float* out, int64_t rows, int64_t blocks) {
  using B = Block<bits>;
  for (int64_t b = 0; b < blocks; ++b) {
    decode_block<bits, false>(in + b * B::bytes, out + b * B::size);
    for (int64_t row = 1; row < rows; ++row)
      decode_block<bits, true>(in + (row * blocks + b) * B::bytes, out + b * B::size);
  }
}

inline int counted(const int32_t* counts, int64_t block) { return counts ? counts[block] : Block<1>::size; }

void encode_all_signs(
    const float* x, const float* owed, float* left, uint8_t* out, int64_t blocks, const int32_t* counts) {
  using B = Block<1>;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t at = b * B::size;
    float* rest = left ? left + at : nullptr;
    encode_signs(x + at, owed ? owed + at : nullptr, rest, out + b * B::bytes, counted(counts, b));
  }
}

void decode_all_signs(const uint8_t* in, float* out, int64_t rows, int64_t blocks, const int32_t* counts) {
  decode_all<1>(in, out, rows, blocks);
  for (int64_t b = 0; counts && b < blocks; ++b)
    for (int i = counts[b]; i < Block<1>::size; ++i) out[b * Block<1>::size + i] = 0.0f;
}

}  // namespace

extern "C" void phalanx_encode(
    const float* x, const float* owed, float* left, uint8_t* out, int64_t blocks, int64_t bits, float full,
    const int32_t* counts) {
  if (bits == 1) return encode_all_signs(x, owed, left, out, blocks, counts);
  bits == 8 ? encode_all<8>(x, owed, left, out, blocks, full) : encode_all<4>(x, owed, left, out, blocks, full);
}

extern "C" void phalanx_decode(
    const uint8_t* in, float* out, int64_t rows, int64_t blocks, int64_t bits, const int32_t* counts) {
  if (bits == 1) return decode_all_signs(in, out, rows, blocks, counts);
  bits == 8 ? decode_all<8>(in, out, rows, blocks) : decode_all<4>(in, out, rows, blocks);
}
