#include "device/cuda/jit/source.h"

#include <algorithm>

#include "device/cuda/kernels/list.h"

namespace horoplug::cuda {
namespace {

// Through one more macro, so that arguments are expanded first.
#define HOROPLUG_TEXT(...) #__VA_ARGS__
#define HOROPLUG_THREE(macro, name, a, b) {#name, "-DHP_ONLY=" HOROPLUG_TEXT(macro(name, a, b))},
#define HOROPLUG_MOVE(name, from, to) HOROPLUG_THREE(HP_MOVE, name, from, to)
#define HOROPLUG_REDUCE(name, element, op) HOROPLUG_THREE(HP_REDUCE, name, element, op)
#define HOROPLUG_DOTS(name, element) {#name, "-DHP_ONLY=" HOROPLUG_TEXT(HP_DOTS(name, element))},
#define HOROPLUG_SUM(name) {#name, "-DHP_ONLY=" HOROPLUG_TEXT(HP_SUM(name))},
#define HOROPLUG_BLEND(name, from, to) HOROPLUG_THREE(HP_BLEND, name, from, to)

constexpr KernelName kNames[] = {HOROPLUG_GPU_KERNELS(HOROPLUG_MOVE, HOROPLUG_REDUCE, HOROPLUG_DOTS,
                                                      HOROPLUG_SUM, HOROPLUG_BLEND)};

}  // namespace

std::span<const KernelName> kernel_names() { return kNames; }

const KernelName* find_kernel(const std::string& name) {
  const auto* const found = std::find_if(std::begin(kNames), std::end(kNames),
                                         [&](const KernelName& k) { return k.name == name; });
  return found == std::end(kNames) ? nullptr : found;
}

}  // namespace horoplug::cuda
