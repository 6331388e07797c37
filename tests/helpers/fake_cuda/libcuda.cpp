/* The whole stand-in as one unit: its headers take longer to compile than the rest, so they are compiled only once. */

#include "driver.cpp"
#include "memory.cpp"
#include "modules.cpp"
#include "streams.cpp"
