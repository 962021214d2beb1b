// Takes the place of a stream that is not connected yet: it takes nothing and has nothing.
//
// In a large job, a rank connects at the start with few ranks on other hosts. The link to another
// one has this stream until its first use makes the mesh ask for a connection (Mesh::connect).
#pragma once

#include "transport/stream.h"

namespace horoplug {

class AbsentStream final : public Stream {
 public:
  std::size_t write(const iovec*, int) override { return 0; }
  std::ptrdiff_t read(void*, std::size_t) override { return 0; }
  void close_write() override {}
  Traits traits() const override { return {WakeUp::kAbsent}; }
};

}  // namespace horoplug
