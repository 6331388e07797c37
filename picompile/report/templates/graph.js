// Points out a node on both sides, and the arrows at it. The page works without.
let lit = [];
document.addEventListener("pointerover", (event) => {
  for (const element of lit) element.classList.remove("lit");
  const found = event.target.closest("[data-node], [data-mention]");
  const article = event.target.closest("article");
  if (!found || !article) { lit = []; return; }
  const name = CSS.escape(found.dataset.node ?? found.dataset.mention);
  const keys = ["node", "mention", "from", "to"].map((key) => `[data-${key}="${name}"]`);
  lit = [...article.querySelectorAll(keys.join(", "))];
  for (const element of lit) element.classList.add("lit");
});
