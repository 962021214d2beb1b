// User memory that all co-located ranks map: each rank owns one part, and the other ranks access it
// without copies.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "transport/fd.h"
#include "transport/shm/segment.h"

namespace horoplug {

class SharedBuffer {
 public:
  // `parts`: by rank, all of the same size; or only this rank's part, which is then not shared.
  // `file` and `place`: the location of this rank's part, whose memory is returned to the system
  // when the buffer ends.
  SharedBuffer(std::uint32_t number, int rank, std::vector<Segment> parts, Fd file,
               std::size_t place);
  ~SharedBuffer();
  SharedBuffer(const SharedBuffer&) = delete;
  SharedBuffer& operator=(const SharedBuffer&) = delete;

  // The same number on all ranks; numbers start at 1.
  std::uint32_t number() const { return number_; }
  std::byte* data() const { return mine().data(); }
  std::size_t bytes() const { return mine().size(); }
  bool shared() const { return parts_.size() > 1; }

  bool contains(const void* address, std::size_t bytes) const {
    // larger than every size if the address lies before the buffer
    const std::size_t at = offset(address);
    return at <= this->bytes() && bytes <= this->bytes() - at;
  }
  std::size_t offset(const void* address) const {
    return reinterpret_cast<std::uintptr_t>(address) - reinterpret_cast<std::uintptr_t>(data());
  }
  // Translates an address in this rank's part to the same position in another rank's part.
  std::ptrdiff_t distance(int rank) const {
    return static_cast<std::ptrdiff_t>(
        reinterpret_cast<std::uintptr_t>(parts_[static_cast<std::size_t>(rank)].data()) -
        reinterpret_cast<std::uintptr_t>(data()));
  }

 private:
  const Segment& mine() const { return parts_[shared() ? static_cast<std::size_t>(rank_) : 0]; }

  const std::uint32_t number_;
  const int rank_;
  const std::vector<Segment> parts_;
  const Fd file_;
  const std::size_t place_;
  const ::pid_t owner_;
};

}  // namespace horoplug
