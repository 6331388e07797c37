/* All of the stand-in as one unit: its headers take longer to compile than the rest, and so are compiled once. */

#include "driver.cpp"
#include "memory.cpp"
#include "modules.cpp"
#include "streams.cpp"
