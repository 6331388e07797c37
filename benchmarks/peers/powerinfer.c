/* What peers_powerinfer.py calls of PowerInfer, so that the layout of its structs is its own header's business. */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "llama.h"

struct session {
    struct llama_context * context;
    struct llama_batch batch;
};

/* Returns the model in the file `path`, NULL if it cannot be loaded. */
struct llama_model * pi_load(const char * path) {
    llama_backend_init(false);
    return llama_load_model_from_file(path, llama_model_default_params());
}

int pi_vocab(const struct llama_model * model) { return llama_n_vocab(model); }

/* Returns 1 if neurons that predictors leave out are skipped, 0 if all are computed. */
int pi_is_sparse(const struct llama_model * model) { return llama_use_sparse_inference(model); }

uint64_t pi_bytes(const struct llama_model * model) { return llama_model_size(model); }

const char * pi_system(void) { return llama_print_system_info(); }

/* Returns a cache of `tokens` tokens, read in chunks of `chunk` at most by `threads` threads; NULL without memory. */
struct session * pi_open(struct llama_model * model, int tokens, int chunk, int threads) {
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = tokens;
    params.n_batch = chunk;
    params.n_threads = params.n_threads_batch = threads;
    struct session * session = malloc(sizeof *session);
    if (!session) return NULL;
    session->context = llama_new_context_with_model(model, params);
    if (!session->context) {
        free(session);
        return NULL;
    }
    session->batch = llama_batch_init(chunk, 0, 1);
    return session;
}

/* Reads `count` tokens behind `position`; the last one's logits are computed. Returns what llama_decode does. */
int pi_read(struct session * session, const int32_t * tokens, int count, int position) {
    struct llama_batch * batch = &session->batch;
    batch->n_tokens = count;
    for (int i = 0; i < count; i++) {
        batch->token[i] = tokens[i];
        batch->pos[i] = position + i;
        batch->n_seq_id[i] = 1;
        batch->seq_id[i][0] = 0;
        batch->logits[i] = i == count - 1;
    }
    return llama_decode(session->context, *batch);
}

/* Returns the logits of the row `row` of what was read last. */
const float * pi_logits(struct session * session, int row) { return llama_get_logits_ith(session->context, row); }

/* Forgets all tokens from `position` on. */
void pi_rewind(struct session * session, int position) {
    llama_kv_cache_seq_rm(session->context, -1, position, -1);
}

void pi_close(struct session * session) {
    llama_batch_free(session->batch);
    llama_free(session->context);
    free(session);
}
