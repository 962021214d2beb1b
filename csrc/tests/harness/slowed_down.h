// Whether a sanitizer or an emulator slows the tests down.
#pragma once

// Tests are five to fifteen times slower under a sanitizer or an emulator, and some are slower
// still. They run only a part of their grids there, which finds the same defects.
// HOROPLUG_EMULATED: an option of CMake, for wheels of another architecture than the machine's.
#if defined(HOROPLUG_TSAN) || defined(HOROPLUG_ASAN) || defined(HOROPLUG_EMULATED)
#define HOROPLUG_SLOWED_DOWN 1
#else
#define HOROPLUG_SLOWED_DOWN 0
#endif

namespace horoplug::testing {

inline constexpr bool kSlowedDown = HOROPLUG_SLOWED_DOWN == 1;

}  // namespace horoplug::testing
