#include "device/cuda/jit/source.h"

#include <algorithm>

namespace horoplug::cuda {
namespace {

constexpr KernelName kNames[] = {
#define HP_MOVE(name, from, to) {#name, "-DHP_ONLY=HP_MOVE(" #name "," #from "," #to ")"},
#define HP_REDUCE(name, element, op) {#name, "-DHP_ONLY=HP_REDUCE(" #name "," #element "," #op ")"},
#define HP_DOTS(name, element) {#name, "-DHP_ONLY=HP_DOTS(" #name "," #element ")"},
#define HP_SUM(name) {#name, "-DHP_ONLY=HP_SUM(" #name ")"},
#define HP_BLEND(name, from, to) {#name, "-DHP_ONLY=HP_BLEND(" #name "," #from "," #to ")"},
#include "device/cuda/kernels/list.def"
};

}  // namespace

std::span<const KernelName> kernel_names() { return kNames; }

const KernelName* find_kernel(const std::string& name) {
  const auto* const found = std::find_if(std::begin(kNames), std::end(kNames),
                                         [&](const KernelName& k) { return k.name == name; });
  return found == std::end(kNames) ? nullptr : found;
}

}  // namespace horoplug::cuda
