"use strict";
// Each view: a token looks (pointed at, tapped or focused) and every other token shows what it is to it.
// Text reaches the page through textContent alone.
(() => {
  const MOST = 8;
  const share = (w) => (w === 0 ? "0" : w < 0.01 ? "<1 %" : Math.round(100 * w) + " %");
  const size = (m) => (typeof m === "number" ? String(Number(m.toPrecision(2))) : String(m));

  function make(parent, name, text, className) {
    const element = document.createElement(name);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    parent.append(element);
    return element;
  }

  function ranges(numbers) {
    const runs = [];
    for (const n of numbers) {
      const last = runs[runs.length - 1];
      if (last && last[1] === n - 1) last[1] = n;
      else runs.push([n, n]);
    }
    return runs.map(([a, b]) => (a === b ? String(a) : a + "–" + b)).join(", ");
  }

  function view(root) {
    const data = JSON.parse(root.querySelector(".data").textContent);
    const tokens = [...root.querySelectorAll(".words .tok")];
    const reading = root.querySelector(".reading");
    const layer = root.querySelector(".layer");
    const head = root.querySelector(".head");
    const count = tokens.length;
    const bytes = Uint8Array.from(atob(data.attention), (c) => c.charCodeAt(0));
    let pinned = Math.floor(0.6 * count);
    let looking = pinned;

    function weights(query) {
      if (!data.heads) return null;
      const heads = head.value === "mean" ? [...Array(data.heads).keys()] : [Number(head.value)];
      const row = new Array(count).fill(0);
      for (const h of heads) {
        const start = ((Number(layer.value) * data.heads + h) * count + query) * count;
        for (let key = 0; key < count; key++) row[key] += bytes[start + key] / 255 / heads.length;
      }
      return row;
    }

    const magnitude = (m) => (typeof m === "number" ? Math.abs(m) : m === null ? 0 : Infinity);
    const highest = Math.max(0, ...data.moved.flat().map(magnitude).filter(Number.isFinite));

    function look(query) {
      looking = query;
      const may = data.may[query];
      const attended = weights(query);
      const moved = data.moved.length ? data.moved[query] : null;
      const most = attended ? Math.max(...attended) || 1 : 1;
      tokens.forEach((token, key) => {
        const sees = may[key] === "1";
        const m = moved ? magnitude(moved[key]) : 0;
        token.classList.toggle("looks", key === query);
        token.classList.toggle("hid", !sees);
        token.classList.toggle("leak", m > 0 && !sees);
        token.style.setProperty("--a", attended ? Math.sqrt(attended[key] / most).toFixed(3) : "0");
        token.style.setProperty("--m", m > 0 ? (0.25 + 0.75 * Math.min(1, Math.sqrt(m / (highest || 1)))).toFixed(3) : "0");
        token.dataset.weight = attended ? attended[key].toFixed(4) : "";
        token.dataset.moved = moved && moved[key] !== null ? String(moved[key]) : "";
        const said = [sees ? "may be seen" : "must not be seen"];
        if (attended) said.push("attention " + share(attended[key]));
        if (moved) said.push(moved[key] === null ? "not replaced" : "moved it by " + size(moved[key]));
        token.title = key + ": " + said.join(", ");
        token.setAttribute("aria-label", data.names[key] + ", token " + key + ", " + said.join(", "));
        token.setAttribute("aria-pressed", String(key === pinned));
        token.tabIndex = key === query ? 0 : -1;
      });
      say(query, may, attended, moved);
    }

    function say(query, may, attended, moved) {
      reading.replaceChildren();
      const title = make(reading, "p", "Token " + query + " ");
      make(title, "b", data.names[query]);
      const seen = [...may].flatMap((c, key) => (c === "1" ? [key] : []));
      make(reading, "h4", "may see");
      make(reading, "p", seen.length ? seen.length + " of " + count + " tokens: " + ranges(seen) : "nothing", "may-see");
      if (attended) {
        make(reading, "h4", "attends to, layer " + layer.selectedOptions[0].textContent + ", " +
          (head.value === "mean" ? "mean of heads" : "head " + head.value));
        list("attends", attended, attended, share, "bar");
      }
      if (!moved) return;
      make(reading, "h4", "was moved by");
      list("moved-by", moved.map(magnitude), moved, size, "bar moved");
      const wrong = moved.flatMap((m, key) => (magnitude(m) > 0 && may[key] !== "1" ? [key] : []));
      if (wrong.length) {
        make(reading, "p", "✗ moved by " + wrong.length + (wrong.length > 1 ? " tokens" : " token") +
          " that it must not see: " + ranges(wrong), "warning");
      }
    }

    function list(name, sizes, values, words, bar) {
      const order = sizes.map((_, key) => key).filter((key) => sizes[key] > 0).sort((a, b) => sizes[b] - sizes[a]);
      if (!order.length) return void make(reading, "p", "nothing", name);
      const body = make(make(reading, "table", undefined, name), "tbody");
      const largest = Math.max(...sizes.filter(Number.isFinite)) || 1;
      for (const key of order.slice(0, MOST)) {
        const row = make(body, "tr");
        make(row, "td", key + " " + data.names[key]);
        make(row, "td", words(values[key]));
        make(make(row, "td"), "span", "", bar).style.setProperty("--w", Math.min(1, sizes[key] / largest).toFixed(3));
      }
      if (order.length > MOST) make(reading, "p", "and " + (order.length - MOST) + " more", "faint");
    }

    tokens.forEach((token, key) => {
      token.setAttribute("role", "button");
      token.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && look(key));
      token.addEventListener("click", () => { pinned = key; look(key); });
      token.addEventListener("focus", () => { pinned = key; look(key); });
      token.addEventListener("keydown", (event) => {
        const to = { ArrowRight: key + 1, ArrowLeft: key - 1, Home: 0, End: count - 1, Enter: key, " ": key }[event.key];
        if (to === undefined) return;
        event.preventDefault();
        tokens[Math.max(0, Math.min(count - 1, to))].focus();
      });
    });
    root.querySelector(".words").addEventListener("pointerleave", () => looking !== pinned && look(pinned));
    for (const control of [layer, head]) if (control) control.addEventListener("change", () => look(looking));
    look(pinned);
  }

  document.documentElement.classList.add("js");
  for (const root of document.querySelectorAll(".view")) view(root);
})();
