#include "controller/state/signature.h"

#include <functional>
#include <sstream>

#include "base/hash.h"
#include "base/status.h"

namespace horoplug {
namespace {

bool first_dimension_counts(OpKind op) { return !operation_info(op).rows_differ; }

std::string describe_number(double value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

std::string describe_shapes(const Signature& signature) {
  // A variant has the ranks that agree, and these may have different first dimensions where that is
  // allowed.
  const bool any_rows = !first_dimension_counts(signature.op);
  std::string text;
  for (const Shape& shape : signature.shapes) {
    if (!text.empty()) text += ", ";
    if (text.size() > 200) return text + "…";
    std::string one = describe_shape(shape);
    if (any_rows && !shape.empty()) one.replace(1, std::to_string(shape.front()).size(), "*");
    text += one;
  }
  return text;
}

bool same_shapes(const Signature& a, const Signature& b) {
  if (first_dimension_counts(a.op)) return a.shapes == b.shapes;
  if (a.shapes.size() != b.shapes.size()) return false;
  for (std::size_t i = 0; i < a.shapes.size(); ++i) {
    // A scalar counts as one row of one element, like a vector of length one.
    const Shape& x = a.shapes[i];
    const Shape& y = b.shapes[i];
    const Shape rest_x(x.empty() ? x.end() : x.begin() + 1, x.end());
    const Shape rest_y(y.empty() ? y.end() : y.begin() + 1, y.end());
    if (rest_x != rest_y) return false;
  }
  return true;
}

bool same_set(const Signature& a, const Signature& b) {
  const bool concerned = a.op == OpKind::kAddSet || a.op == OpKind::kRemoveSet;
  return !concerned || a.op != b.op || a.shapes == b.shapes;
}
bool same_buffer(const Signature& a, const Signature& b) {
  return a.op != OpKind::kAddBuffer || a.op != b.op || a.shapes == b.shapes;
}

std::string describe_layout(const Signature& signature) {
  if (!signature.layout.empty()) return signature.layout;
  return std::string("dense ") + dtype_name(signature.dtype) + " " + describe_shapes(signature);
}

constexpr const char* kSameLayout = "submit the same layout";
constexpr const char* kSameShape = "submit the same shape";
constexpr const char* kSameRows = "submit the same dimensions after the first";

// The properties in which ranks can differ, in the order in which they are reported.
struct Field {
  const char* name;
  const char* advice;
  std::function<bool(const Signature&, const Signature&)> same;
  std::function<std::string(const Signature&)> show;
};

const std::vector<Field>& fields() {
  static const auto* const table = new std::vector<Field>{
      {.name = "layout",
       .advice = kSameLayout,
       .same = [](auto& a, auto& b) { return a.layout == b.layout; },
       .show = describe_layout},
      {.name = "operation",
       .advice = "call the same operation",
       .same = [](auto& a, auto& b) { return a.op == b.op; },
       .show = [](auto& s) { return std::string(op_kind_name(s.op)); }},
      {.name = "process set",
       .advice = "name the same ranks, in calls of the same order",
       .same = same_set,
       .show = [](auto& s) { return describe_shapes(s); }},
      {.name = "buffer size",
       .advice = "create buffers of the same size, in the same order",
       .same = same_buffer,
       .show = [](auto& s) { return describe_shapes(s); }},
      {.name = "reduction",
       .advice = "use the same op=",
       .same = [](auto& a, auto& b) { return !reduces(a.op) || a.reduce == b.reduce; },
       .show = [](auto& s) { return std::string(reduce_op_name(s.reduce)); }},
      {.name = "data type",
       .advice = "submit the same dtype",
       .same = [](auto& a, auto& b) { return a.dtype == b.dtype; },
       .show = [](auto& s) { return std::string(dtype_name(s.dtype)); }},
      {.name = "compression",
       .advice = "use the same compression=",
       .same = [](auto& a, auto& b) { return a.wire == b.wire; },
       .show = [](auto& s) { return std::string(s.wire != nullptr ? s.wire->name : "none"); }},
      {.name = "number of tensors",
       .advice = "submit the same group",
       .same = [](auto& a, auto& b) { return a.shapes.size() == b.shapes.size(); },
       .show = [](auto& s) { return std::to_string(s.shapes.size()); }},
      {.name = "shape",
       .advice = kSameShape,
       .same =
           [](auto& a, auto& b) {
             return is_administrative(a.op) || a.shapes.size() != b.shapes.size() ||
                    same_shapes(a, b);
           },
       .show = [](auto& s) { return describe_shapes(s); }},
      {.name = "root rank",
       .advice = "name the same root",
       .same = [](auto& a, auto& b) { return !operation_info(a.op).has_root || a.root == b.root; },
       .show = [](auto& s) { return std::to_string(s.root); }},
      {.name = "prescale factor",
       .advice = "use the same factors",
       .same = [](auto& a, auto& b) { return a.prescale == b.prescale; },
       .show = [](auto& s) { return describe_number(s.prescale); }},
      {.name = "postscale factor",
       .advice = "use the same factors",
       .same = [](auto& a, auto& b) { return a.postscale == b.postscale; },
       .show = [](auto& s) { return describe_number(s.postscale); }},
      {.name = "device",
       .advice = "keep the tensor on the same kind of device",
       .same = [](auto& a, auto& b) { return (a.device < 0) == (b.device < 0); },
       .show = [](auto& s) { return std::string(s.device < 0 ? "CPU" : "GPU"); }},
  };
  return *table;
}

}  // namespace

std::int64_t rows_of(const Shape& shape) { return shape.empty() ? 1 : shape.front(); }

std::int64_t elements_of(const Shape& shape) {
  std::int64_t count = 1;
  for (const std::int64_t dimension : shape) count *= dimension;
  return count;
}

std::int64_t row_elements(const Shape& shape) {
  std::int64_t count = 1;
  for (std::size_t i = 1; i < shape.size(); ++i) count *= shape[i];
  return count;
}

std::string describe_shape(const Shape& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  return text + "]";
}

std::int64_t payload_bytes(const Signature& signature) {
  if (is_administrative(signature.op)) return 0;
  std::size_t bytes = 0;
  for (const Shape& shape : signature.shapes) bytes += signature.wire_bytes(elements_of(shape));
  return static_cast<std::int64_t>(bytes);
}

std::uint64_t digest(const Signature& signature) {
  Hash hash;
  hash.add(static_cast<std::uint64_t>(signature.op) << 16 |
           static_cast<std::uint64_t>(signature.dtype) << 8 |
           static_cast<std::uint64_t>(signature.reduce));
  hash.add(static_cast<std::uint64_t>(signature.wire_code()));
  hash.add(static_cast<std::uint64_t>(signature.root));
  hash.add(signature.shapes.size());
  for (const Shape& shape : signature.shapes) {
    hash.add(static_cast<std::uint64_t>(
        first_dimension_counts(signature.op) ? elements_of(shape) : row_elements(shape)));
  }
  if (!signature.layout.empty()) hash.add(signature.layout);
  return hash.value();
}

bool compatible(const Signature& a, const Signature& b) {
  for (const Field& field : fields()) {
    if (!field.same(a, b)) return false;
  }
  return true;
}

bool fusable(const Signature& a, const Signature& b) {
  const OperationInfo& info = operation_info(a.op);
  return (info.fuses || info.shares_batch) && a.op == b.op && a.dtype == b.dtype &&
         a.wire == b.wire && a.device == b.device && (!info.has_root || a.root == b.root) &&
         (!info.reduces || a.reduce == b.reduce) && a.prescale == b.prescale &&
         a.postscale == b.postscale;
}

Status mismatch(const std::string& name, const std::vector<Variant>& variants) {
  const Signature& first = variants.front().signature;
  std::string text = "ranks disagree about '" + name + "': ";
  const char* advice = nullptr;
  hp_status code = HP_MISMATCH;
  for (const Field& field : fields()) {
    bool differs = false;
    for (const Variant& variant : variants) differs |= !field.same(first, variant.signature);
    if (!differs) continue;
    if (advice != nullptr) text += "; ";
    if (advice == nullptr) advice = field.advice;
    if (advice == kSameShape && !first_dimension_counts(first.op)) advice = kSameRows;
    text += std::string("mismatched ") + field.name + ": ";
    for (std::size_t i = 0; i < variants.size() && i < 8; ++i) {
      if (i > 0) text += " but ";
      text +=
          field.show(variants[i].signature) + " on " + describe_ranks(variants[i].ranks.ranks());
    }
    if (advice == kSameLayout) {
      // The layout says it all; the shapes and types of parts of a tensor would only confuse.
      code = HP_LAYOUT_MISMATCH;
      break;
    }
  }
  if (advice != nullptr) text += std::string(" (") + advice + " on every rank)";
  return {code, text};
}

}  // namespace horoplug
