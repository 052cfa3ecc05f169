#include "cuda/step/outline.hpp"
#include "tests/support/catch.hpp"
