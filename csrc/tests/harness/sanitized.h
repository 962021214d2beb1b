// Whether a sanitizer checks this test.
#pragma once

namespace horoplug::testing {

// Tests are five to fifteen times slower under a sanitizer, and some are slower still. They run
// only a part of their grids there, in which a sanitizer finds the same defects.
#if defined(HOROPLUG_TSAN) || defined(HOROPLUG_ASAN)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

}  // namespace horoplug::testing
