// A reference of the wire format "int8": what its kernels and an allreduce of several ranks
// compute, element by element.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "base/wire_format.h"

namespace horoplug::testing {

inline const WireFormat& int8_format() { return *find_wire_format(kInt8Blocks); }

// What is decoded of encoded values.
inline std::vector<float> through_int8(const std::vector<float>& values) {
  std::vector<float> decoded(values.size());
  const std::size_t block = int8_format().block;
  for (std::size_t begin = 0; begin < values.size(); begin += block) {
    const std::size_t end = std::min(begin + block, values.size());
    float most = 0;
    bool finite = true;
    for (std::size_t i = begin; i < end; ++i) {
      most = std::max(most, std::fabs(values[i]));
      finite &= std::isfinite(values[i]);
    }
    const float factor = most / 127.0F;
    for (std::size_t i = begin; i < end; ++i) {
      if (!finite) {
        decoded[i] = std::numeric_limits<float>::quiet_NaN();
      } else if (factor > 0) {
        decoded[i] = factor * std::clamp(std::nearbyint(values[i] / factor), -127.0F, 127.0F);
      }
    }
  }
  return decoded;
}

// The results of allreduces on all ranks, with the errors that each rank keeps by name.
class Int8Job {
 public:
  struct Factors {
    float prescale = 1, multiply = 1, divide = 1;
  };
  // `inputs`: by rank.
  std::vector<float> allreduce(const std::string& name,
                               const std::vector<std::vector<float>>& inputs,
                               const Factors& factors) {
    std::vector<std::vector<float>>& errors = errors_[name];
    errors.resize(inputs.size());
    std::vector<float> sum;
    for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
      std::vector<float> values = inputs[rank];
      errors[rank].resize(values.size());
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = values[i] * factors.prescale + errors[rank][i];
      }
      const std::vector<float> sent = through_int8(values);
      sum.resize(values.size());
      for (std::size_t i = 0; i < values.size(); ++i) {
        const float lost = values[i] - sent[i];
        errors[rank][i] = std::isfinite(lost) ? lost : 0;
        sum[i] = rank == 0 ? sent[i] : sum[i] + sent[i];
      }
    }
    for (float& value : sum) value = value * factors.multiply / factors.divide;
    return through_int8(sum);
  }
  void reset() { errors_.clear(); }

 private:
  std::map<std::string, std::vector<std::vector<float>>> errors_;
};

}  // namespace horoplug::testing
