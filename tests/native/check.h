// What the C++ tests check with.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                     \
  do {                                                                       \
    if (!(condition)) {                                                      \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);   \
      std::abort();                                                          \
    }                                                                        \
  } while (false)
