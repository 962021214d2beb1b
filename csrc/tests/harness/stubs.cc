#include "tests/harness/stubs.h"

namespace horoplug::testing {

std::string stub(const std::string& kind, const std::string& file) {
  return std::string(HOROPLUG_STUBS) + "/" + kind + "/" + file;
}

}  // namespace horoplug::testing
