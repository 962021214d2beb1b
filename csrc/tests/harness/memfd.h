// memfd_create without the C library, whose versions before 2.27 lack it.
#pragma once

#include <linux/memfd.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace horoplug {

inline int new_memfd(const char* name, unsigned flags) {
  return static_cast<int>(::syscall(SYS_memfd_create, name, flags));
}

}  // namespace horoplug
